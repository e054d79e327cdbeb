"""Log lines: one a record, in both forms, whatever the record holds."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from engine_core.wire.logs import LineFormatter, LogFormat, plain

ODD = "a\nb\r\x1b[31mc\u2028d\x85e\ud800f\x00é"


def record(message: str, *args: object, error: BaseException | None = None, **facts: object) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("some.module", logging.WARNING, "file.py", 7, message, args, info)
    made.created, made.msecs = 86400.25, 250.0
    if facts:
        made.facts = facts
    return made


def inner() -> None:
    raise KeyError("inner canary")


def outer() -> None:
    try:
        inner()
    except KeyError as error:
        raise ValueError("outer\ncanary") from error


def raised() -> Exception:
    with pytest.raises(ValueError) as caught:
        outer()
    return caught.value


def test_a_line_for_people() -> None:
    line = LineFormatter("core", "text", values=True).format(record("seen %d", 5, tokens=3, name="x y"))
    assert line == '1970-01-02T00:00:00.250Z WARNING core some.module seen 5 tokens=3 name="x y"'


def test_a_line_for_programs() -> None:
    line = LineFormatter("executor", "json", values=True).format(record("seen %d", 5, tokens=3, level="mine"))
    found = json.loads(line)
    assert isinstance(found.pop("pid"), int)
    assert found == {
        "time": "1970-01-02T00:00:00.250Z",
        "level": "WARNING",
        "process": "executor",
        "logger": "some.module",
        "message": "seen 5",
        "tokens": 3,
    }


@pytest.mark.parametrize("form", ["text", "json"])
def test_nothing_leaves_its_line(form: LogFormat) -> None:
    line = LineFormatter("core", form, values=True).format(record("%s", ODD, error=raised(), fact=ODD))
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    line.encode()
    if form == "json":
        assert json.loads(line)["message"] == plain(ODD)


def test_plain_keeps_what_can_be_read() -> None:
    assert plain("né 漢 \U0001f600") == "né 漢 \U0001f600"
    assert plain(ODD) == "a\\nb\\r\\x1b[31mc\\u2028d\\x85e\\ud800f\\x00é"


def test_an_error_is_told_with_its_causes() -> None:
    line = LineFormatter("core", "text", values=True).format(record("failed", error=raised()))
    assert "ValueError: outer\\ncanary at test_logs.py:" in line
    assert " outer <- KeyError: 'inner canary' at test_logs.py:" in line


def test_what_an_error_says_can_be_left_out() -> None:
    for form in ("text", "json"):
        line = LineFormatter("frontend", form, values=False).format(record("failed", error=raised()))
        assert "canary" not in line
        assert "ValueError at test_logs.py:" in line


def test_a_process_writes_lines_to_stderr() -> None:
    program = (
        "import logging; from engine_core.wire.logs import log_lines; log_lines('core', 'text'); "
        "log_lines('core', 'json'); logging.getLogger('x').info('hello'); logging.getLogger('x').debug('no')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["message"] == "hello"
    assert done.stdout == ""
