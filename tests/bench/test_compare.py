"""Commands in turn."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import psutil
import pytest

from bench.__main__ import main
from bench.compare import last_object, ratios
from bench.errors import CommandFailed
from bench.record import read_record
from tests.bench.test_http_client import DONE, USAGE, chunked, text
from tests.fakes.waiting import until


def python(code: str) -> str:
    """A shell line that runs Python code."""
    return shlex.join([sys.executable, "-c", code])


def test_the_last_line_is_what_counts() -> None:
    assert last_object("a", "echo noise; echo '{\"x\": 3}'; echo; echo more >&2", 10.0) == {"x": 3}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo no >&2; exit 3", "a: status 3: no"),
        ("echo 5", r"a: the last line of its output is no JSON object: \['5'\]"),
        ("true", r"a: .* \[\]"),
    ],
)
def test_a_command_that_gives_nothing_is_told_with_its_words(command: str, message: str) -> None:
    with pytest.raises(CommandFailed, match=message):
        last_object("a", command, 10.0)


def test_nothing_of_a_command_is_left_when_its_time_is_up(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    child = python("import time; time.sleep(60)")
    with pytest.raises(CommandFailed, match=r"a: it took longer than 0\.5 s"):
        last_object("a", f"{child} & echo $! > {path}; wait", 0.5)
    pid = int(path.read_text())
    until("the child has ended", lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")


def test_ratios_are_of_medians_and_their_spread_of_rounds() -> None:
    samples: dict[str, list[dict[str, float]]] = {
        "a": [{"x": 10.0}, {"x": 20.0}, {"x": 12}],
        "b": [{"x": 15.0}, {"x": 20.0}, {"x": 30.0}],
    }
    one, two = ratios(samples, "x")
    assert (one["median"], one["ratio"], one["ratio_low"], one["ratio_high"]) == (12, 1.0, 1.0, 1.0)
    assert (two["median"], two["low"], two["high"]) == (20.0, 15.0, 30.0)
    assert two["ratio"] == pytest.approx(20 / 12)
    assert (two["ratio_low"], two["ratio_high"]) == (1.0, 2.5)


def test_a_dot_goes_into_an_object() -> None:
    (one,) = ratios({"a": [{"whole": {"32": 5.0}}]}, "whole.32")
    assert one["median"] == 5.0
    with pytest.raises(CommandFailed, match=r"a: whole\.8 is None"):
        ratios({"a": [{"whole": {"32": 5.0}}]}, "whole.8")


@pytest.mark.parametrize("value", [None, "5", True, 0, -1.0])
def test_a_figure_that_is_no_number_above_zero_is_refused(value: object) -> None:
    samples: dict[str, list[dict[str, object]]] = {"a": [{"x": 1.0}], "b": [{"x": value, "y": 2}]}
    with pytest.raises(CommandFailed, match=r"b: x is .* it has: x, y"):
        ratios(samples, "x")


def test_commands_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = tmp_path / "log", tmp_path / "record.json"
    lines = {name: f"echo {name} >> {log}; echo '{{\"rate\": {value}}}'" for name, value in (("a", 2), ("b", 5))}
    words = [word for name, line in lines.items() for word in ("--run", name, line)]
    assert main(["compare", *words, "--figure", "rate", "--rounds", "3", "--result-file", str(out)]) == 0
    assert log.read_text().split() == ["a", "b"] * 3
    assert "2.50-2.50" in capsys.readouterr().out
    record = read_record(out)
    assert [one["ratio"] for one in record.results] == [1.0, 2.5]
    assert record.raw == [{"a": [{"rate": 2}] * 3, "b": [{"rate": 5}] * 3}]


SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked = 0
    def do_GET(self):
        body = b'{"data": [{"id": "one"}]}'
        Handler.asked += self.path == "/health"
        # /health is 503 while the server loads, HEALTH when it has done so.
        self.send_response(200 if self.path != "/health" else 503 if Handler.asked < 3 else HEALTH)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.wfile.write(ANSWER if Handler.asked >= 3 else LOADING)
    def log_message(self, *words): pass
http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


LOADING = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize("health", [200, 404])
def test_a_server_is_started_loaded_and_ended(
    tmp_path: Path, unused_port: int, capfd: pytest.CaptureFixture[str], health: int
) -> None:
    answer = chunked(text("a"), text("b"), USAGE, DONE)
    script = tmp_path / "server.py"
    words = {"ANSWER": repr(answer), "LOADING": repr(LOADING), "PORT": str(unused_port), "HEALTH": str(health)}
    text_of = SERVER
    for word, value in words.items():
        text_of = text_of.replace(word, value)
    script.write_text(text_of)
    command, url = shlex.join([sys.executable, str(script)]), f"http://127.0.0.1:{unused_port}"
    load = "--num-prompts 3 --max-concurrency 1 --random-input-len 2"
    flags = [
        "--server",
        "own",
        url,
        f"exec {command}",
        "--load",
        "few",
        load,
        "--load",
        "more",
        f"{load} --num-prompts 5",
    ]
    assert main(["compare", *flags, "--json", "--figure", "completed", "memory_mib", "--rounds", "2"]) == 0
    found = {one["figure"]: one["median"] for one in map(json.loads, capfd.readouterr().out.splitlines())}
    assert found.pop("memory_mib") > 5
    assert found == {"few: completed": 3, "more: completed": 5}
    assert not [one for one in psutil.Process().children(recursive=True) if str(script) in one.cmdline()]


def test_a_server_that_does_not_come_is_told() -> None:
    words = ["--server", "own", "http://127.0.0.1:9", "echo why; exit 1", "--load", "one", ""]
    assert main(["compare", *words, "--rounds", "1"]) == 4


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--run", "a", "true", "--run", "a", "true"],
        ["--run", "a", "x", "--rounds", "0"],
        ["--run", "a", "x", "--load", "one", ""],
        ["--server", "a", "http://127.0.0.1:9", "x"],
        ["--server", "a", "http://127.0.0.1:9", "x", "--load", "one", "", "--load", "one", ""],
    ],
)
def test_flags_that_compare_nothing_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *words]) == 2
    assert capsys.readouterr().err.startswith("error: --")
