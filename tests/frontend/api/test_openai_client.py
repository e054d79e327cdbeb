"""The official Python client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.fakes.live import NAME, LiveServer


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    """A client of the server."""
    with openai.OpenAI(
        base_url=f"{live.url}/v1", api_key="none", max_retries=0, http_client=openai.DefaultHttpxClient(trust_env=False)
    ) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "hi"}], max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].message.content == "abc"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert [entry.token for entry in answer.choices[0].logprobs.content] == ["a", "b", "c"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "abcde"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt=["a", "k"], max_tokens=2, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["bc", "lm"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["b", "c"]
    stream = client.completions.create(model=NAME, prompt="a", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "bcde"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME, "alias"]
    assert client.models.retrieve("alias").id == "alias"


def test_errors_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as invalid:
        client.completions.create(model=NAME, prompt="a", temperature=9, stream=True)
    assert invalid.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=NAME, prompt="a" * 3000)
    assert long.value.code == "context_length_exceeded"


def test_a_failure_in_a_stream_is_an_exception(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as live, openai.DefaultHttpxClient(trust_env=False) as transport:
        live.core.step_s = 0.01
        own = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, http_client=transport)
        stream = own.completions.create(model=NAME, prompt="a", max_tokens=900, stream=True)
        next(stream)
        live.call(lambda: live.core.die("executor_died", "the executor died"))
        with pytest.raises(openai.APIError, match="the executor died"):
            list(stream)
