"""What is written of requests: one line each, ids and counts; never text, never a key."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.waiting import until
from tests.hostile.process import Served

# Words that must never be seen again: in a prompt, a message, a field, a name, a broken body, an unknown model.
CANARY = "xylocarp"
KEYS = {"flag": "sk-flag-zanthoxylum", "file": "sk-file-quagswagging", "variable": "sk-env-mumpsimus"}
AUTH = {"authorization": f"Bearer {KEYS['file']}"}
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR) (frontend|core|executor) ")


@pytest.fixture(scope="module", params=["text", "json"])
def served(
    request: pytest.FixtureRequest, chain_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A server with keys from everywhere, and the form of its lines."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"\n {KEYS['file']} \n\nsk-other\n", encoding="utf-8")
    flags = ["--log-format", request.param, "--enable-log-requests", "--api-key", KEYS["flag"]]
    environment = {"TERCET_API_KEY": KEYS["variable"]}
    with Served(chain_folder, *flags, "--api-key-file", str(keys), environment=environment) as server:
        yield server, request.param


def post(server: Served, body: Any, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.http.post(path, content=content, headers={**AUTH, **given})


def requests_told(server: Served, form: str) -> list[dict[str, Any]]:
    """The facts of each line about a request."""
    found: list[dict[str, Any]] = []
    for line in server.log().splitlines():
        if "request ended" in line and form == "json":
            found.append(json.loads(line))
        elif "request ended" in line:
            found.append(dict(part.split("=", 1) for part in shlex.split(line.split(" request ended ")[1])))
    return found


def test_no_text_and_no_key_in_any_log(served: Any) -> None:
    server, _ = served
    long = {"max_tokens": 5, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": CANARY, "name": CANARY}], **long}
    for body in (
        {"prompt": CANARY, **long},
        {"prompt": [CANARY, CANARY], "n": 2, "stream": True, **long},
        {"prompt": CANARY, "stop": CANARY, "user": CANARY, "cache_salt": CANARY, **long},
        {"prompt": CANARY, "temperature": CANARY},
        {"prompt": CANARY * 2000},
        {"prompt": CANARY, "tools": [CANARY]},
        b'{"prompt": "' + CANARY.encode(),
        b"\xff" + CANARY.encode(),
    ):
        post(server, body)
    post(server, chat, "/v1/chat/completions")
    post(server, {**chat, "chat_template_kwargs": {CANARY: CANARY}}, "/v1/chat/completions")
    post(server, {**chat, "messages": [{"role": CANARY, "content": CANARY}]}, "/v1/chat/completions")
    for key in (*KEYS.values(), "sk-wrong-" + CANARY):
        server.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    text = server.log()
    assert CANARY not in text
    assert not any(key in text for key in KEYS.values())


def test_keys_are_in_no_process_list(served: Any) -> None:
    server, _ = served
    frontend, *below = server.tree()
    shown = " ".join(" ".join(each.cmdline()) for each in (frontend, *below))
    assert not any(key in shown for key in KEYS.values())
    for child in below:
        assert not any(key in str(child.environ()) for key in KEYS.values())


@pytest.mark.parametrize("source", KEYS)
def test_keys_of_every_source_open(served: Any, source: str) -> None:
    server, _ = served
    answer = server.http.get("/v1/models", headers={"authorization": f"Bearer {KEYS[source]}"})
    assert answer.status_code == 200


def test_every_line_has_the_form(served: Any) -> None:
    server, form = served
    post(server, {"prompt": "a", "max_tokens": 1})
    processes = set()
    until("a line of the request", lambda: "request ended" in server.log())
    for line in server.log().splitlines():
        # What the operator is told while it starts is no log.
        if form == "json" and line.startswith("{"):
            record = json.loads(line)
            assert {"time", "level", "process", "pid", "logger", "message"} <= record.keys()
            processes.add(record["process"])
        elif form == "text" and (found := LINE.match(line)):
            processes.add(found[2])
        else:
            assert not re.match(r"Traceback|  File|\d{4}-", line), line
    # The fake executor says nothing.
    assert processes >= {"frontend", "core"}


def test_one_line_for_each_request_with_counts_and_times(served: Any) -> None:
    server, form = served
    ids = {"plain": f"one-{form}", "stream": f"two-{form}", "refused": f"three-{form}", "nothing": f"four-{form}"}
    fields = {"max_tokens": 4, "ignore_eos": True}
    post(server, {"prompt": "ab", "n": 2, **fields}, x_request_id=ids["plain"])
    post(server, {"prompt": "ab", "stream": True, **fields}, x_request_id=ids["stream"])
    post(server, {"prompt": "ab", "n": 0}, x_request_id=ids["refused"])
    server.http.get("/nothing", headers={**AUTH, "x-request-id": ids["nothing"]})
    server.http.get("/health")
    told = {each["request_id"]: each for each in requests_told(server, form)}
    plain = told[ids["plain"]]
    assert [str(plain[name]) for name in ("status", "answers", "prompt_tokens", "completion_tokens", "finish")] == [
        *("200", "2", "2", "8", "length")
    ]
    assert float(plain["seconds"]) >= float(plain["first_token_s"]) > 0
    assert str(told[ids["stream"]]["completion_tokens"]) == "4"
    assert str(told[ids["refused"]]["status"]) == "400"
    assert str(told[ids["nothing"]]["status"]) == "404"
    assert not any("health" in each["path"] for each in told.values())


def test_a_client_that_left_is_told(served: Any) -> None:
    server, form = served
    name = f"left-{form}"
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body, headers={**AUTH, "x-request-id": name}) as answer:
        assert next(answer.iter_lines())
    until("its line", lambda: any(each["request_id"] == name for each in requests_told(server, form)))
    (told,) = [each for each in requests_told(server, form) if each["request_id"] == name]
    assert told["finish"] in ("abort", "length")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("abc-123", True),
        ("~" * 128, True),
        ("with blank", True),
        ("~" * 129, False),
        ("\xe9", False),
        ("tab\tin it", False),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/nothing", "/live", "/metrics"])
def test_ids_come_back_on_every_answer(served: Any, path: str, given: str, kept: bool) -> None:
    server, _ = served
    headers = {**AUTH, "x-request-id": given.encode("latin-1")}
    answer = server.http.get(path, headers=headers)
    assert (answer.headers["x-request-id"] == given) is kept
    assert len(answer.headers.get_list("x-request-id")) == 1
    # Also where there is no key.
    assert server.http.get(path, headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"


def test_an_id_is_made_where_there_is_none(served: Any) -> None:
    server, _ = served
    found = {server.http.get("/live").headers["x-request-id"] for _ in range(5)}
    assert len(found) == 5
