"""What a ready executor settles, and in what the next one may differ."""

from __future__ import annotations

import msgspec
import pytest

from engine_core.readiness import announcement, limits_of, unlike
from engine_core.wire.config import CacheOptions, EngineConfig, SchedulerOptions, TextFacts
from engine_core.wire.executor import ExecutorReady, KvGroup
from tests.fakes.core_process import fake_model
from tests.wire.messages import LOAD

CONFIG = EngineConfig(
    model=fake_model(),
    cache=CacheOptions(block_size=4),
    scheduler=SchedulerOptions(max_num_seqs=3),
    text=TextFacts(eos_token_ids=(7,)),
)
READY = ExecutorReady(
    epoch=2,
    max_model_len=64,
    vocab_size=50,
    dtype="float32",
    kv_cache_dtype="float32",
    device="cpu",
    kv_groups=[KvGroup(None, 32), KvGroup(9, 8)],
    max_num_batched_tokens=16,
    load=LOAD,
    kernels=[],
    startup_s={"start": 1.0},
    memory={},
)
MEASURES = [
    CacheOptions(block_size=4, kv_cache_reservation="contiguous"),
    CacheOptions(block_size=4, enable_kv_cache=False),
]


def test_limits_come_from_both() -> None:
    limits = limits_of(CONFIG, READY)
    assert (limits.max_model_len, limits.vocab_size, limits.max_num_batched_tokens) == (64, 50, 16)
    assert limits.kv_groups == (KvGroup(None, 32), KvGroup(9, 8))
    assert (limits.block_size, limits.max_num_seqs, limits.eos_token_ids) == (4, 3, (7,))


@pytest.mark.parametrize("cache", MEASURES)
def test_with_cache_or_paging_off_nothing_slides(cache: CacheOptions) -> None:
    limits = limits_of(msgspec.structs.replace(CONFIG, cache=cache), READY)
    assert limits.kv_groups == (KvGroup(None, 32), KvGroup(None, 8))
    assert limits.room == 32


def test_what_clients_are_told() -> None:
    told = announcement(CONFIG, READY)
    assert (told.epoch, told.startup_s, told.model.path) == (2, {"start": 1.0}, "fake:")
    assert (told.model.num_kv_blocks, told.model.block_size, told.model.eos_token_ids) == (40, 4, (7,))


@pytest.mark.parametrize("field", ["max_model_len", "vocab_size", "max_num_batched_tokens"])
def test_a_replacement_is_alike(field: str) -> None:
    before = limits_of(CONFIG, READY)
    value = getattr(before, field)
    after = msgspec.structs.replace(before, **{field: value + 1})
    assert unlike(before, after) == f"{field}: {value + 1}, the executor before had {value}"
    fewer = msgspec.structs.replace(before, kv_groups=(KvGroup(None, 7), KvGroup(9, 5)))
    assert unlike(before, fewer) is None
    others = msgspec.structs.replace(before, kv_groups=(KvGroup(None, 32), KvGroup(8, 8)))
    assert unlike(before, others) == "windows of KV groups: [None, 8], the executor before had [None, 9]"
