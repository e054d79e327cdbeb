"""A pack of token sequences through a server and through the reference execution."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from engine_core.wire import evidence
from engine_core.wire.client import Output, TokenLogprobs
from engine_core.wire.evidence import PackEntry, ReferenceRun
from engine_core.wire.sampling import SamplingParams
from frontend.client import Client
from frontend.errors import EngineFailed
from frontend.proof.own_server import OwnServer
from frontend.proof.sentinel import FORMAT, Sentinel, check_served, place_of
from frontend.proof.tools import REFERENCE, run_tool
from frontend.tokenizer.load import load_tokenizer

READY_S: Final = 1800.0


def run_reference(model: Path, flags: Sequence[str]) -> ReferenceRun:
    """The plain execution of a plan.

    Args:
        model: the folder.
        flags: choice of blocks and dtype.

    Raises:
        StartError: the model or the plan is refused.
    """
    vocab = load_tokenizer(model).vocab_size
    return run_tool(REFERENCE, [str(model), *flags, "--sample-vocab", str(vocab)], ReferenceRun)


def observe(model: Path, flags: Sequence[str], reference: ReferenceRun, socket: Path | None) -> Sentinel:
    """Run the pack through a server, sequence by sequence.

    Args:
        model: the folder.
        flags: choice of blocks and dtype, for a server of one's own.
        reference: of the same plan.
        socket: of a running server; None: one is started.

    Raises:
        StartError: the server failed, or runs another plan.
        EngineDead, EngineTimeout, RequestRejected: it does not answer.
    """
    with ExitStack() as stack:
        if socket is None:
            server = stack.enter_context(OwnServer(model, flags))
            server.wait_ready()
            socket = server.socket
        client = stack.enter_context(Client(socket, name="sentinel"))
        ready = client.wait_ready(READY_S)
        check_served(reference.identity, ready)
        counts = {each.name: len(each.token_ids) for each in reference.sequences}
        served = [_serve(client, entry, counts[entry.name]) for entry in reference.entries]
    return Sentinel(FORMAT, reference, served, place_of(ready, reference, len(os.sched_getaffinity(0))))


def _serve(client: Client, entry: PackEntry, count: int) -> evidence.Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=2)
    # A salt of its own: a cached prefix would be computed in other chunks.
    outputs: list[Output] = list(client.submit(entry.prompt, params, cache_salt=secrets.token_hex(8)))
    logprobs: list[TokenLogprobs] = [each for output in outputs for each in output.logprobs or ()]
    token_ids = [token for output in outputs for token in output.token_ids]
    if len(logprobs) != len(token_ids):
        raise EngineFailed(f"{entry.name}: {len(token_ids)} tokens with {len(logprobs)} log-probabilities")
    return evidence.Sequence(
        name=entry.name,
        token_ids=token_ids,
        logprobs=[each.logprob for each in logprobs],
        leads=[each.top_logprobs[0] - each.top_logprobs[1] for each in logprobs],
    )
