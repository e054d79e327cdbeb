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
from functools import wraps
from string import Formatter
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter

from frontend.tokenizer.template_limits import (
    Budget,
    check_join,
    check_operation,
    check_size,
    check_text_call,
    check_width,
)

# Filters of jinja2 that make something longer than what they are given.
LENGTHENING: Final = ("batch", "center", "format", "indent", "join", "replace", "slice")
# Filter names that no template can write.
EACH: Final = " each"
ENTER: Final = " enter"
SIZED: Final = " sized"


class Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class Bounded(Formatter):
    """One call of str.format whose fields are not huge, alone or together, whatever their widths come from."""

    _made = 0

    def format_field(self, value: Any, format_spec: str) -> Any:  # noqa: ANN401
        """A field whose width and precision are numbers by now."""
        check_width(format_spec)
        field = super().format_field(value, format_spec)
        self._made += len(field)
        check_size(self._made)
        return field


class BoundedFormatter(Bounded, SandboxedFormatter):
    """Of a text."""


class BoundedEscapeFormatter(Bounded, SandboxedEscapeFormatter):
    """Of a text in which all else is escaped."""


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

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, now: Callable[[], datetime], clock: Callable[[], float] = time.thread_time) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])
        self._clock = clock
        self._running = threading.local()
        self.filters |= {name: _guarded(name, self.filters[name]) for name in LENGTHENING}
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
        check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """A call that the sandbox allows, unless it is a text's method with a huge result."""
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            check_text_call(obj.__name__, owner, args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:  # noqa: ANN401
        """The format methods of a text, without huge results. Jinja replaces them, so `call` does not see them."""
        if super().wrap_str_format(value) is None:
            return None
        form: str = value.__self__
        escape = getattr(form, "escape", None)  # of a text that is safe in HTML
        mapped = value.__name__ == "format_map"

        @wraps(value)
        def bounded(*args: Any, **kwargs: Any) -> str:  # noqa: ANN401
            values, named = ((), dict(*args, **kwargs)) if mapped else (args, kwargs)
            check_text_call("format", form, values, named)
            formatter = BoundedFormatter(self) if escape is None else BoundedEscapeFormatter(self, escape=escape)
            return type(form)(formatter.vformat(form, values, named))

        return bounded

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
        check_size(length)
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
    check_size(len(value))
    return value


def _guarded(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of jinja2 that makes texts longer, behind a check of what it would make."""
    # Some filters take a context before the value.
    place = 1 if hasattr(work, "jinja_pass_arg") else 0

    @wraps(work)
    def check(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever a template gives
        value, rest = args[place], args[place + 1 :]
        if name == "join":
            check_join(str(rest[0]) if rest else str(kwargs.get("d", "")), value)
        else:
            check_text_call(name, str(value), rest, kwargs)
        return work(*args, **kwargs)

    return check


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
