"""What a sentinel keeps, and what differs from it.

A sentinel holds a pack of token sequences with what the plainest execution of a plan makes of it, what the server made
of it, and a digest of every weight. Runs of different plans are never compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from engine_core.wire import evidence
from engine_core.wire.client import Ready
from engine_core.wire.evidence import PlanIdentity, ReferenceRun
from frontend.errors import UsageError

FORMAT: Final = 1
SHOWN: Final = 20


class Sentinel(Struct, frozen=True):
    """The content of the file.

    Attributes:
        format: of this Struct.
        reference: the plain execution.
        served: the server's own sequences.
        served_under: where the server ran; equal lists make equal bits.
    """

    format: Literal[1]
    reference: ReferenceRun
    served: list[evidence.Sequence]
    served_under: list[str]


def read_sentinel(path: Path) -> Sentinel:
    """Read the file.

    Raises:
        UsageError: it cannot be read, or is no sentinel.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Sentinel)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path}: no sentinel: {error}") from error


def check_identity(recorded: PlanIdentity, now: PlanIdentity) -> None:
    """Pass runs of one plan.

    Raises:
        UsageError: they are runs of different plans; the message names what differs.
    """
    was, is_now = msgspec.to_builtins(recorded), msgspec.to_builtins(now)
    different = [f"{name} {was[name]}, now {is_now[name]}" for name in was if was[name] != is_now[name]]
    if different:
        raise UsageError(f"the sentinel is of another plan and is not compared: {'; '.join(different)}")


def check_runs(recorded: ReferenceRun, now: ReferenceRun) -> None:
    """Pass runs of one pack on one plan.

    Raises:
        UsageError: they differ in either; the message names it.
    """
    check_identity(recorded.identity, now.identity)
    if recorded.entries != now.entries:
        raise UsageError(f"the sentinel holds pack {recorded.pack}, this program has {now.pack} or other tokens in it")


def check_served(recorded: PlanIdentity, ready: Ready) -> None:
    """Pass a server that runs the recorded plan.

    Raises:
        UsageError: it runs another one.
    """
    served = msgspec.structs.replace(
        recorded,
        revision=ready.load.revision,
        layer_map=ready.load.layer_map,
        classes=ready.load.classes,
        dtype=ready.model.dtype,
        kv_cache_dtype=ready.model.kv_cache_dtype,
        quantization=ready.model.quantization,
    )
    check_identity(recorded, served)


def place_of(ready: Ready, run: ReferenceRun, processors: int) -> list[str]:
    """Where a server ran, as far as its bits depend on it."""
    where = run.environment
    kernels = [f"{choice.operator}: {choice.problem}: {choice.chosen}" for choice in ready.kernels]
    return [where.python, where.torch, where.machine, where.device, f"{processors} processors", *kernels]


def differences(recorded: Sentinel, now: Sentinel) -> list[str]:
    """All that differs between two runs of one plan; empty: nothing does.

    Weights must be equal to the bit. So must both executions where they ran under the same conditions; under others
    the reference's bound counts, and a token may differ where the recorded lead is a near tie within it.
    """
    return [
        *_weights(recorded.reference, now.reference),
        *_run("reference", recorded.reference, now.reference.sequences, _same_place(recorded, now)),
        *_run("server", recorded.reference, now.served, exact=None),
        *_served(recorded, now),
    ]


def _same_place(recorded: Sentinel, now: Sentinel) -> Mapping[str, evidence.Sequence] | None:
    if recorded.reference.environment != now.reference.environment:
        return None
    return {each.name: each for each in recorded.reference.sequences}


def _served(recorded: Sentinel, now: Sentinel) -> Iterator[str]:
    if recorded.served_under == now.served_under:
        exact = {each.name: each for each in recorded.served}
        yield from _run("server", recorded.reference, now.served, exact)


def _weights(recorded: ReferenceRun, now: ReferenceRun) -> Iterator[str]:
    was = {each.name: each for each in recorded.weights}
    for each in now.weights:
        if each.name not in was or was[each.name].digest != each.digest:
            made = f" (from {', '.join(each.sources)})" if each.sources else ""
            yield f"weight {each.name}{made}: other bytes"
    missing = was.keys() - {each.name for each in now.weights}
    yield from (f"weight {name}: is gone" for name in sorted(missing))


def _run(
    who: str,
    recorded: ReferenceRun,
    sequences: Sequence[evidence.Sequence],
    exact: Mapping[str, evidence.Sequence] | None,
) -> Iterator[str]:
    expected = {each.name: each for each in recorded.sequences} if exact is None else exact
    found = {each.name: each for each in sequences}
    if expected.keys() != found.keys():
        yield f"{who}: other sequences: {sorted(expected.keys() ^ found.keys())}"
    bound = recorded.bound if exact is None else 0.0
    for name in sorted(expected.keys() & found.keys()):
        yield from (f"{who}: {name}: {fault}" for fault in _sequence(expected[name], found[name], bound))


def _sequence(expected: evidence.Sequence, found: evidence.Sequence, bound: float) -> Iterator[str]:
    """The first difference of two sequences; behind it they are of different texts."""
    if len(expected.token_ids) != len(found.token_ids):
        yield f"{len(found.token_ids)} tokens, recorded {len(expected.token_ids)}"
        return
    for place, (was, now) in enumerate(zip(expected.token_ids, found.token_ids, strict=True)):
        if was != now:
            if not bound or expected.leads[place] > 2 * bound:
                yield f"token {place} is {now}, recorded {was} with a lead of {expected.leads[place]:.3g}"
            return
        error = abs(found.logprobs[place] - expected.logprobs[place])
        if not error <= bound:
            yield f"token {place}: log-probability off by {error:.3g}, allowed {bound:.3g}"
            return


def lines(faults: Sequence[str], sentinel: Sentinel) -> list[str]:
    """The outcome for people; the verdict is the last line."""
    identity = sentinel.reference.identity
    blocks = f"{len(identity.layer_map)} of {identity.blocks} blocks in {identity.numbers}"
    reference = sentinel.reference
    pack = f"pack {reference.pack}, {len(reference.sequences)} sequences, {len(reference.weights)} weights"
    text = [f"{identity.architecture} {identity.revision}: {blocks}; {pack}"]
    text += [f"differs: {fault}" for fault in faults[:SHOWN]]
    if len(faults) > SHOWN:
        text.append(f"and {len(faults) - SHOWN} more")
    return [*text, f"verdict: {'fail' if faults else 'pass'}"]
