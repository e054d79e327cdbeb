"""What a ready executor means: the scheduler's limits, and the model as clients see it."""

from __future__ import annotations

from engine_core.admission import Limits
from engine_core.wire.client import Model, Ready
from engine_core.wire.config import EngineConfig
from engine_core.wire.executor import ExecutorReady, KvGroup


def limits_of(config: EngineConfig, ready: ExecutorReady) -> Limits:
    """The limits that executor and configuration settle."""
    groups = ready.kv_groups
    if not config.cache.lasting:
        # Nothing behind a window is let go of: each pool holds whole sequences.
        groups = [KvGroup(None, group.num_blocks) for group in groups]
    return Limits(
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        kv_groups=tuple(groups),
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=ready.max_num_batched_tokens,
        eos_token_ids=config.text.eos_token_ids,
    )


def announcement(config: EngineConfig, ready: ExecutorReady) -> Ready:
    """What clients are told."""
    model = Model(
        path=config.model.model,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        eos_token_ids=config.text.eos_token_ids,
        dtype=ready.dtype,
        kv_cache_dtype=ready.kv_cache_dtype,
        num_kv_blocks=ready.num_kv_blocks,
        block_size=config.cache.block_size,
        quantization=config.model.quantization,
    )
    return Ready(model, ready.load, ready.kernels, ready.startup_s, ready.epoch, ready.graphs)


def unlike(before: Limits, after: Limits) -> str | None:
    """What a replacement may not have otherwise than the executor before it; the number of KV blocks may differ."""
    for field in ("max_model_len", "vocab_size", "max_num_batched_tokens"):
        was, now = getattr(before, field), getattr(after, field)
        if was != now:
            return f"{field}: {now}, the executor before had {was}"
    windows = [[group.window for group in limits.kv_groups] for limits in (before, after)]
    if windows[0] != windows[1]:
        return f"windows of KV groups: {windows[1]}, the executor before had {windows[0]}"
    return None
