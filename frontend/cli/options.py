"""Command-line options out of configuration Structs, which alone hold name, type, range, default and help text."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct, UnsetType, inspect

from frontend.errors import UsageError

C = TypeVar("C", bound=Struct)

# What is part of a configuration but not for a user to give.
HIDDEN: Final = frozenset({"version", "text"})


class Option(Struct, frozen=True):
    """One field as a command-line option.

    Attributes:
        path: names from the root Struct down to the field.
        section: first line of the Struct that holds it: the title of its group in the help.
        kind: type of a value, without None and without the list around it.
        many: the option may be repeated.
        default: of the field.
        text: help.
    """

    path: tuple[str, ...]
    section: str
    kind: inspect.Type
    many: bool
    default: object
    text: str

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return "--" + self.path[-1].replace("_", "-")


def options(root: type[Struct]) -> list[Option]:
    """All options of a configuration, in the order of its fields."""
    return list(_walk(inspect.type_info(root), ()))


def _walk(node: inspect.Type, path: tuple[str, ...]) -> Iterator[Option]:
    assert isinstance(node, inspect.StructType)
    section = (node.cls.__doc__ or "").strip().splitlines()[0].rstrip(".")
    for field in node.fields:
        kind, text = _described(field.type)
        here = (*path, field.name)
        if field.name in HIDDEN:
            continue
        if isinstance(kind, inspect.StructType):
            yield from _walk(kind, here)
        else:
            inner, many = _inner(kind)
            yield Option(here, section, inner, many, field.default, text)


def _described(node: inspect.Type) -> tuple[inspect.Type, str]:
    if isinstance(node, inspect.Metadata):
        schema: Mapping[str, object] = node.extra_json_schema or {}
        return node.type, str(schema.get("description", ""))
    return node, ""


def _inner(node: inspect.Type) -> tuple[inspect.Type, bool]:
    if isinstance(node, inspect.UnionType):
        (node,) = (each for each in node.types if not isinstance(each, inspect.NoneType))
        node, _ = _described(node)
    if isinstance(node, inspect.VarTupleType):
        return node.item_type, True
    return node, False


def add_options(parser: argparse.ArgumentParser, found: list[Option], *, positional: str | None = None) -> None:
    """Give `parser` one flag for each option, grouped by section; `positional` names the option given by position."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in found:
        if option.path[-1] == positional:
            parser.add_argument(
                ".".join(option.path), nargs="?", default=argparse.SUPPRESS, metavar="MODEL_DIR", help=option.text
            )
            continue
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(option.section)
        _add(groups[option.section], option)


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    common: dict[str, Any] = {"dest": ".".join(option.path), "default": argparse.SUPPRESS, "help": _help(option)}
    if isinstance(option.kind, inspect.BoolType):
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **common)
        return
    if option.many and isinstance(option.kind, inspect.IntType):
        common |= {"action": "extend", "nargs": "+"}
    elif option.many:
        common |= {"action": "append"}
    group.add_argument(option.flag, type=_reader(option.kind), metavar=_metavar(option.kind), **common)


def _help(option: Option) -> str:
    notes = [note for note in (allowed(option.kind, choices=False), _default(option)) if note]
    return (option.text + (f" ({', '.join(notes)})" if notes else "")).replace("%", "%%")


def _default(option: Option) -> str:
    if option.default in (None, (), "") or isinstance(option.default, UnsetType):
        return ""
    if isinstance(option.default, bool):
        return "default: on" if option.default else "default: off"
    return f"default: {option.default}"


def _metavar(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.LiteralType):
        return "{" + ",".join(str(value) for value in kind.values) + "}"
    return {inspect.IntType: "N", inspect.FloatType: "X"}.get(type(kind), "TEXT")


def allowed(kind: inspect.Type, *, choices: bool = True) -> str:
    """What values an option takes, as text; empty when any will do."""
    if isinstance(kind, inspect.LiteralType):
        return "one of " + ", ".join(str(value) for value in kind.values) if choices else ""
    if not isinstance(kind, (inspect.IntType, inspect.FloatType)):
        return ""
    bounds = [
        f"{sign} {value}"
        for sign, value in ((">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt))
        if value is not None and abs(value) < 2**31 - 1
    ]
    return " and ".join(bounds)


def _reader(kind: inspect.Type) -> Callable[[str], object]:
    def read(text: str) -> object:
        if isinstance(kind, inspect.LiteralType):
            return _choice(kind, text)
        value = _parsed(kind, text)
        if isinstance(value, (int, float)) and not _inside(kind, value):
            raise argparse.ArgumentTypeError(f"{text} is out of range: {allowed(kind)}")
        return value

    return read


def _choice(kind: inspect.LiteralType, text: str) -> object:
    if text in kind.values:
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not {allowed(kind)}{nearest(text, map(str, kind.values))}")


def _parsed(kind: inspect.Type, text: str) -> object:
    names = {inspect.IntType: ("a whole number", int), inspect.FloatType: ("a number", float)}
    if type(kind) not in names:
        if not text:
            raise argparse.ArgumentTypeError("an empty text is no value")
        return text
    name, make = names[type(kind)]
    try:
        return make(text)
    except ValueError as error:
        note = allowed(kind)
        raise argparse.ArgumentTypeError(f"{text!r} is not {name}" + (f" {note}" if note else "")) from error


def _inside(kind: inspect.Type, value: float) -> bool:
    assert isinstance(kind, (inspect.IntType, inspect.FloatType))
    # Written so that NaN is outside.
    return (
        (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
        and (kind.lt is None or value < kind.lt)
        and value - value == 0
    )


def nearest(given: str, known: Iterator[str] | list[str]) -> str:
    """`; did you mean X?` for the known name most like `given`, else nothing."""
    close = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def merged(base: Mapping[str, object], given: Mapping[tuple[str, ...], object]) -> dict[str, object]:
    """Nested values of `base`, overridden by those in `given` (path -> value)."""
    result: dict[str, object] = dict(base)
    for path, value in given.items():
        level = result
        for name in path[:-1]:
            below = level.get(name)
            level[name] = dict(below) if isinstance(below, dict) else {}
            level = level[name]  # type: ignore[assignment]
        level[path[-1]] = value
    return result


def build(root: type[C], values: Mapping[str, object], source: str) -> C:
    """The validated configuration.

    Raises:
        UsageError: a value is unknown, missing or out of range; the message starts with `source`.
    """
    try:
        return msgspec.convert(values, root)
    except msgspec.ValidationError as error:
        found = re.search(r"unknown field `(.*?)`", str(error))
        places = {option.path[-1]: ".".join(option.path) for option in options(root)}
        close = difflib.get_close_matches(found[1], list(places), n=1, cutoff=0.5) if found else []
        hint = f"; did you mean {places[close[0]]}?" if close else ""
        raise UsageError(f"{source}: {error}{hint}") from error
