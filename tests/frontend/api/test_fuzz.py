"""Bodies broken at random: a right answer or a 4xx, and nothing left behind."""

from __future__ import annotations

import random
import re

import pytest

from tests.fakes.live import LiveServer, eventually

COMPLETION = (
    b'{"prompt": "ab", "max_tokens": 3, "n": 2, "stream": true, "stop": ["x"], "seed": 5, "logprobs": 2, '
    b'"stream_options": {"include_usage": true}}'
)
CHAT = (
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 3, '
    b'"logprobs": true, "top_logprobs": 3, "temperature": 0.5, "stop": "c", "chat_template_kwargs": {"a": 1}}'
)
BASES = (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT))
VALUES = (
    *(b"null", b"true", b"0", b"-1", b"1e308", b"1e-320", b"99999999999999999999", b'""', b'"\\u0000"', b"[]"),
    *(b"{}", b"[null]", b'{"a":null}', b'"\\ud83d\\ude00"', b"0.1", b"[[1]]", b'"<|end|>"', b"9223372036854775807"),
)
VALUE = re.compile(rb'(?<=: )("[^"]*"|[\d.]+|true|\[[^\[\]]*\]|\{[^{}]*\})')


def broken(body: bytes, draw: random.Random) -> bytes:
    """The body with another value, another byte, or cut."""
    kind = draw.random()
    place = draw.randrange(len(body) + 1)
    spots = [match.span() for match in VALUE.finditer(body)]
    if kind < 0.5 and spots:
        start, end = draw.choice(spots)
        return body[:start] + draw.choice(VALUES) + body[end:]
    if kind < 0.8:
        return body[:place] + bytes([draw.randrange(256)]) + body[place + draw.randrange(2) :]
    return body[:place]


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_no_body_makes_a_server_error(live: LiveServer, seed: int) -> None:
    draw = random.Random(seed)
    seen = set()
    for _ in range(10_000 if seed == 2 else 250):
        path, body = draw.choice(BASES)
        for _ in range(draw.randrange(1, 4)):
            body = broken(body, draw)
        answer = live.post(path, body)
        seen.add(answer.status_code)
        assert answer.status_code in (200, 400, 404), (body, answer.text)
    assert {200, 400} <= seen
    eventually(lambda: not live.core.live and not live.client.open_generations, "nothing is left")
    assert live.complete("a", max_tokens=2)["choices"][0]["text"] == "bc"
