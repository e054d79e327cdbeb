"""Sampling parameters: limits are checked where they arrive, and nothing unknown is ignored."""

from __future__ import annotations

import msgspec
import pytest

from engine_core.wire import client
from engine_core.wire.errors import MalformedFrame
from engine_core.wire.sampling import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, SamplingParams
from tests.wire.messages import CLIENT_TO_CORE, PARAMS


def test_sampling_params_take_no_field_they_do_not_know() -> None:
    """A parameter that this core cannot honour must not be ignored."""
    fields = msgspec.msgpack.decode(CLIENT_TO_CORE.encode(client.Submit("r1", b"", PARAMS)))
    fields[3].append(1.5)
    with pytest.raises(MalformedFrame, match="length"):
        CLIENT_TO_CORE.decode(msgspec.msgpack.encode(fields))


def with_params(**changes: object) -> bytes:
    fields = {**msgspec.structs.asdict(SamplingParams()), **changes}
    return msgspec.msgpack.encode(["submit", "r1", b"", list(fields.values())])


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -2},
        {"top_k": 2**31},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"seed": -1},
        {"seed": 2**63},
        {"max_tokens": -1},
        {"min_tokens": -1},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [0] * (MAX_STOP_TOKEN_IDS + 1)},
        {"logprobs": MAX_LOGPROBS + 1},
        {"logprobs": True},
    ],
    ids=str,
)
def test_sampling_limits(changes: dict[str, object]) -> None:
    with pytest.raises(MalformedFrame):
        CLIENT_TO_CORE.decode(with_params(**changes))


def test_sampling_limits_are_inclusive() -> None:
    edges = {"temperature": 2, "top_k": -1, "top_p": 0, "seed": 2**63 - 1, "logprobs": MAX_LOGPROBS}
    message = CLIENT_TO_CORE.decode(with_params(**edges, stop_token_ids=[0] * MAX_STOP_TOKEN_IDS))
    assert message.params.seed == 2**63 - 1


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=0.0), True),
        (SamplingParams(temperature=1e-4), True),
        (SamplingParams(temperature=1.1e-4), False),
        (SamplingParams(top_p=0.0), True),
        (SamplingParams(top_p=0.01), False),
        (SamplingParams(top_k=1), True),
        (SamplingParams(top_k=2), False),
    ],
)
def test_greedy(params: SamplingParams, greedy: bool) -> None:
    assert params.greedy is greedy


def test_defaults_change_nothing() -> None:
    """The plain model distribution, to the end of the model's length."""
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.seed, params.max_tokens, params.min_tokens, params.stop_token_ids) == (None, None, 0, ())
    assert (params.ignore_eos, params.logprobs) == (False, None)
