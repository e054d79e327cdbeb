"""The configuration is written and read whole, or refused with the name of what is wrong."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine_core.wire.config import (
    CacheOptions,
    ConfigInvalid,
    Deadlines,
    EngineConfig,
    ExecutorOptions,
    ModelOptions,
    SchedulerOptions,
    TextFacts,
    config_hash,
    read_config,
    write_config,
)

FULL = EngineConfig(
    model=ModelOptions("model", "bfloat16", "int8", "dummy", 4096, 2**63 - 1),
    cache=CacheOptions(32, 100, 2**40, enable_prefix_caching=False),
    scheduler=SchedulerOptions(8, 256, 64, 32, "priority", "static", async_scheduling=False, max_num_queued_reqs=5),
    executor=ExecutorOptions("cpu", 2),
    deadlines=Deadlines(10.5, 5.5),
    text=TextFacts((1, 2), 512),
)


@pytest.mark.parametrize("config", [EngineConfig(), FULL], ids=["default", "full"])
def test_written_and_read(config: EngineConfig, tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    write_config(config, path)
    assert read_config(path) == config
    assert config_hash(read_config(path)) == config_hash(config)
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_hash_is_stable() -> None:
    """Two builds of this version must agree; a change here is a change of what peers compare."""
    assert config_hash(EngineConfig()) == "e70363cc2e2bb13c"


def test_the_hash_tells_values_apart_but_not_spellings() -> None:
    one = EngineConfig(deadlines=Deadlines(start_timeout=5))
    assert config_hash(one) == config_hash(EngineConfig(deadlines=Deadlines(start_timeout=5.0)))
    assert config_hash(one) != config_hash(EngineConfig(deadlines=Deadlines(start_timeout=6)))
    assert config_hash(EngineConfig(text=TextFacts((1,)))) != config_hash(EngineConfig(text=TextFacts((2,))))


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("model", "dtype", "int8"),
        ("model", "load_format", "pickle"),
        ("model", "max_model_len", 0),
        ("model", "max_model_len", 2**31),
        ("model", "seed", -1),
        ("cache", "block_size", 0),
        ("cache", "block_size", 1025),
        ("cache", "num_kv_blocks", 0),
        ("cache", "kv_cache_memory_bytes", 0),
        ("cache", "enable_prefix_caching", 1),
        ("cache", "kv_cache_reservation", "whole"),
        ("scheduler", "max_num_seqs", 0),
        ("scheduler", "max_num_seqs", 4097),
        ("scheduler", "max_num_batched_tokens", 0),
        ("scheduler", "scheduling_policy", "lifo"),
        ("scheduler", "batching", "none"),
        ("scheduler", "max_num_queued_reqs", 0),
        ("executor", "device", "tpu"),
        ("executor", "cpu_threads", 0),
        ("deadlines", "start_timeout", 0),
        ("deadlines", "step_timeout", 86401),
        ("text", "eos_token_ids", "2"),
        ("model", "colour", "blue"),
        ("cache", "blok_size", 16),
    ],
)
def test_a_wrong_value_is_refused_by_name(section: str, field: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_bytes(msgspec.json.encode({section: {field: value}}))
    with pytest.raises(ConfigInvalid) as refused:
        read_config(path)
    assert str(path) in str(refused.value)
    assert field in str(refused.value)


@pytest.mark.parametrize("off", [{"enable_kv_cache": False}, {"kv_cache_reservation": "contiguous"}])
def test_prefixes_are_shared_unless_the_cache_or_paging_is_off(off: dict[str, object], tmp_path: Path) -> None:
    assert CacheOptions().shares_prefixes
    assert not CacheOptions(enable_prefix_caching=False).shares_prefixes
    path = tmp_path / "engine.json"
    for asked in ({}, {"enable_prefix_caching": False}):
        path.write_bytes(msgspec.json.encode({"cache": off | asked}))
        assert not read_config(path).cache.shares_prefixes
    path.write_bytes(msgspec.json.encode({"cache": off | {"enable_prefix_caching": True}}))
    with pytest.raises(ConfigInvalid, match="enable_prefix_caching: true: it needs enable_kv_cache"):
        read_config(path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_bytes(msgspec.json.encode({"version": 2}))
    with pytest.raises(ConfigInvalid, match="version"):
        read_config(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": {"model": "\xff\xfe"}}',
        b"\xff\xfe{}",
        b'{"a": ' * 100_000,
        b'{"text": NaN}',
    ],
    ids=["empty", "cut", "list", "null", "bad utf-8 value", "bad utf-8", "deep", "nan"],
)
def test_what_is_no_configuration_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_bytes(content)
    with pytest.raises(ConfigInvalid):
        read_config(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"none\.json"):
        read_config(tmp_path / "none.json")


def test_a_configuration_never_changes() -> None:
    with pytest.raises(AttributeError):
        EngineConfig().cache.block_size = 8  # type: ignore[misc]
