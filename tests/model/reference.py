"""A slow scheduler that is obviously right: one request at a time, first come first served, nothing shared."""

from __future__ import annotations

from itertools import accumulate

from tests.model.executor import Model
from tests.model.trace import Request


def steps_alone(request: Request, model: Model) -> int:
    """Steps that a request takes with the engine to itself: its tokens in full chunks, then one step a token."""
    tokens = (len(request.submit.prompt) + len(request.submit.output)) // 4
    return -(-tokens // model.max_num_batched_tokens) + len(request.expected) - 1


def one_by_one(requests: list[Request], model: Model) -> list[int]:
    """For each request the number of the step after which it is done, when they are served in this order."""
    return list(accumulate(steps_alone(request, model) for request in requests))
