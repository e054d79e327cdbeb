"""What the executor tells about its start, as plain data, so that readers need no torch."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Phase = Literal["start", "plan", "load", "kv_cache", "warm_up", "capture", "build", "warm_run", "pack"]
"""Parts of a start that do not overlap. pack: weights take the form that their kernels read.
warm_up: the first run of a step; warm_run: the same step once more."""

PageCacheState = Literal["cold", "partly", "warm", "unknown"]

# Read-ahead leaves a few pages behind, and the kernel may have dropped a few.
COLD = 0.05
WARM = 0.95

TensorState = Literal[
    "loaded", "fused", "tied", "generated", "skipped_by_plan", "ignored_by_rule", "missing", "unexpected"
]


class TensorRecord(Struct, frozen=True):
    """One tensor of the checkpoint or of the model.

    Attributes:
        name: of the parameter in the model, or of the tensor in the checkpoint when no parameter takes it.
        state: what became of it.
        sources: checkpoint tensors it was made from.
        file: the shard that holds the first source, relative to the model folder.
        nbytes: materialized in memory.
        source_dtype, dtype: in the checkpoint and in memory.
        rule: the rule's text, for "ignored_by_rule".
    """

    name: str
    state: TensorState
    sources: list[str] = []
    file: str = ""
    nbytes: int = 0
    source_dtype: str = ""
    dtype: str = ""
    rule: str = ""


class LoadReport(Struct, frozen=True):
    """One load of weights.

    Attributes:
        model: the folder.
        revision: of the checkpoint: a digest of its headers and configuration.
        layer_map: source index of each runtime layer.
        tensors: every tensor with its state.
        shards_opened: files read; shards_skipped: files not opened.
        bytes_read: from files; bytes_materialized: in memory.
        counts: tensors by state.
        page_cache: share of the opened bytes in the page cache before the load (0 cold, 1 warm); None: unknown.
        seconds: of planning, and of reading.
        classes: name of each runtime layer's class.
    """

    model: str
    revision: str
    layer_map: list[int]
    tensors: list[TensorRecord]
    shards_opened: list[str]
    shards_skipped: list[str]
    bytes_read: int
    bytes_materialized: int
    counts: dict[TensorState, int]
    page_cache: float | None
    seconds: dict[str, float]
    classes: list[str] = []


def page_cache_state(share: float | None) -> PageCacheState:
    """What the share of a load's bytes that were in memory before says: "unknown" where the kernel did not tell."""
    if share is None:
        return "unknown"
    return "cold" if share < COLD else "warm" if share > WARM else "partly"


class KernelCandidate(Struct, frozen=True):
    """One kernel that could serve an operator; `reasons` is empty when it fits."""

    name: str
    reasons: list[str]


class KernelChoice(Struct, frozen=True):
    """The kernel chosen for one operator of one layer class, and why the others were not.

    Attributes:
        operator: such as "attention" or "kv_append".
        problem: what it must do, as text.
        chosen: name of the kernel.
        candidates: all of the registry, in order of preference.
    """

    operator: str
    problem: str
    chosen: str
    candidates: list[KernelCandidate]
