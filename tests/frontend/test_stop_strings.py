"""Stop strings: where text is cut, and what is held back."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.stop_strings import StopScanner

LETTERS = st.text(alphabet="ab.", max_size=30)
STOPS = st.lists(st.text(alphabet="ab.", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The plain way: the first place at which a stop string ends; of several the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text.endswith(stop, 0, end)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def held(text: str, stops: list[str]) -> int:
    """The longest end of the text with which a stop string begins."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


def chunked(data: st.DataObject, text: str) -> list[str]:
    """The text in pieces of any length."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(st.data(), LETTERS, STOPS, st.booleans())
def test_the_cut_does_not_depend_on_the_pieces(data: st.DataObject, text: str, stops: list[str], include: bool) -> None:
    scanner = StopScanner(stops, include=include)
    out, taken = "", ""
    for piece in chunked(data, text):
        out, taken = out + scanner.push(piece), taken + piece
        if scanner.match is not None:
            break
        # Only what may still become a stop string is held back.
        assert len(taken) - len(out) == held(taken, stops)
    if scanner.match is None:
        out += scanner.flush()
    assert (out, scanner.match) == cut(text, stops, include)


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["ABC", "DEF", "G", "HI", "J"], ["DEFGHIJ"], ["ABC", "", "", "", ""]),
        (["ABC", "DEF", "GX"], ["DEFGHIJ"], ["ABC", "", "DEFGX"]),
        (["..."], [".."], [""]),
        (["a..."], [".."], ["a"]),
        (["xABCD"], ["ABCD", "BC"], ["xA"]),
        (["one two"], ["two", "one"], [""]),
    ],
)
def test_examples(pieces: list[str], stops: list[str], shown: list[str]) -> None:
    scanner = StopScanner(stops)
    assert [scanner.push(piece) for piece in pieces] == shown


def test_include_ends_with_the_stop_string() -> None:
    scanner = StopScanner([".."], include=True)
    assert scanner.push("a...") == "a.."
    assert scanner.match == ".."


def test_long_stop_strings_cost_linear_time() -> None:
    stop = "ab" * 50_000 + "c"
    scanner = StopScanner([stop, stop[1:] + "d", "zz"])
    started = time.thread_time()
    out = "".join(scanner.push("abab") for _ in range(50_000)) + scanner.flush()
    assert len(out) == 200_000
    assert time.thread_time() - started < 5.0


def test_a_long_stop_string_costs_nothing_before_it_matches() -> None:
    started = time.thread_time()
    for _ in range(100):
        assert StopScanner(["x" * 100_000] * 4).push("hello") == "hello"
    assert time.thread_time() - started < 1.0
