"""The Jinja environment of chat templates: sandboxed, and bounded in steps, time and size.

Templates come with the model folder. They get no attribute or call that leads out of the sandbox, and each turn of a
loop, each call of a macro and each joined text is counted, so that no template can run or grow without end.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS: Final = 1_000_000
MAX_CPU_S: Final = 1.0
MAX_CHARACTERS: Final = 64 * 2**20
MAX_POWER_BITS: Final = 4096
STEPS_PER_CLOCK: Final = 256
# Filter names that no template can write.
EACH: Final = " each"
ENTER: Final = " enter"
SIZED: Final = " sized"


class LimitPassed(Exception):
    """Rendering passed a limit; the message names it."""


class Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class Budget:
    """What one rendering may spend.

    Args:
        clock: processor seconds of this thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._end = clock() + MAX_CPU_S
        self._steps = 0

    def step(self) -> None:
        """Count a step.

        Raises:
            LimitPassed: too many, or too long.
        """
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise LimitPassed(f"the chat template took more than {MAX_STEPS} steps")
        if self._steps % STEPS_PER_CLOCK == 0 and self._clock() > self._end:
            raise LimitPassed(f"the chat template took longer than {MAX_CPU_S:g} s")


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the assistant's part for training: its body, here."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that counts.

    Args:
        now: the time that strftime_now prints.
        clock: processor seconds of this thread.
    """

    intercepted_binops = frozenset({"*", "**", "+"})

    def __init__(self, now: Callable[[], datetime], clock: Callable[[], float] = time.thread_time) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])
        self._clock = clock
        self._running = threading.local()
        self.filters["tojson"] = _to_json
        self.filters[EACH] = self._each
        self.filters[ENTER] = self._enter
        self.filters[SIZED] = _sized
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: now().strftime(form)

    @contextmanager
    def budget(self) -> Iterator[None]:
        """Renderings in this block, in this thread, share a new budget."""
        self._running.budget = Budget(self._clock)
        try:
            yield
        finally:
            del self._running.budget

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        """An operation, unless its result would be huge."""
        if operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * max(right, 0), MAX_POWER_BITS, "bits in one number")
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            _check_size(len(left) + len(right), MAX_CHARACTERS, "characters")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, EACH)
        for macro in (*template.find_all(nodes.Macro), *template.find_all(nodes.CallBlock)):
            assert isinstance(macro, nodes.Macro | nodes.CallBlock)
            macro.body.insert(0, nodes.Output([_filtered(nodes.Const(""), ENTER)], lineno=macro.lineno))
        _size_concats(template)
        template.set_environment(self)
        return template

    @jinja2.pass_context
    def _each(self, _: Context, values: Iterable[Any]) -> Iterator[Any]:
        budget: Budget = self._running.budget
        for value in values:
            budget.step()
            yield value

    @jinja2.pass_context
    def _enter(self, _: Context, value: str) -> str:
        budget: Budget = self._running.budget
        budget.step()
        return value


def bounded(pieces: Iterable[str]) -> str:
    """The pieces of a rendering, joined.

    Raises:
        LimitPassed: they are too long.
    """
    out: list[str] = []
    length = 0
    for piece in pieces:
        length += len(piece)
        _check_size(length, MAX_CHARACTERS, "characters")
        out.append(piece)
    return "".join(out)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _size_concats(parent: nodes.Node) -> None:
    for field, value in parent.iter_fields():
        if isinstance(value, list):
            value[:] = [_sized_concat(item) for item in value]
        elif isinstance(value, nodes.Node):
            setattr(parent, field, _sized_concat(value))


def _sized_concat(value: Any) -> Any:  # noqa: ANN401 - a list of nodes may hold strings and pairs too
    if not isinstance(value, nodes.Node):
        return value
    _size_concats(value)
    return _filtered(value, SIZED) if isinstance(value, nodes.Concat) else value


# With the context as argument a filter is never worked out when a template is compiled.
@jinja2.pass_context
def _sized(_: Context, value: str) -> str:
    _check_size(len(value), MAX_CHARACTERS, "characters")
    return value


def _check_product(left: object, right: object) -> None:
    for value, count in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(count, int):
            _check_size(len(value) * count, MAX_CHARACTERS, "characters")


def _check_size(size: int, limit: int, unit: str) -> None:
    if size > limit:
        raise LimitPassed(f"the chat template made more than {limit} {unit}")


def _to_json(
    value: Any,  # noqa: ANN401 - whatever a template holds
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML; transformers' does not, and models are trained on what that one prints.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: object) -> NoReturn:
    raise Refused(str(message))
