"""The configuration of the engine: each option stands here once, with its range and its help text.

The command line, the printed configuration and the file that the processes read are made from these Structs. A
configuration is complete and validated before a process starts, and never changes after.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from engine_core.wire.errors import EngineCoreError
from engine_core.wire.logs import LogFormat

Positive = Annotated[int, Meta(ge=1, lt=2**31)]
Bytes = Annotated[int, Meta(ge=1, le=2**63 - 1)]


class ConfigInvalid(EngineCoreError):
    """A configuration that is no configuration; the message names field, limit and value."""


class ModelOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Which model, and in which form."""

    model: Annotated[str, Meta(description="folder of the model: config.json, *.safetensors, tokenizer")] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="of weights and activations, which stay in float32 on CPU; auto: float32 on CPU, the "
            "checkpoint's on CUDA"
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8"],
        Meta(description="int8: weights and activations of linear layers in int8, CPU only"),
    ] = "none"
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        Meta(description="dummy: weights drawn from a seed, from config.json alone; auto: safetensors"),
    ] = "auto"
    max_model_len: Annotated[
        Positive | None, Meta(description="tokens of prompt and output together; default: what the model was made for")
    ] = None
    seed: Annotated[
        int, Meta(ge=0, le=2**63 - 1, description="of dummy weights and of requests that bring no seed of their own")
    ] = 0
    layers: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=4096,
            description="blocks to run: full, cover (one of each class), first:N, or indices such as 0,3,7-9",
        ),
    ] = "full"
    allow_missing_classes: Annotated[
        bool, Meta(description="take a choice of blocks that leaves a class of blocks out")
    ] = False


class CacheOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The KV cache."""

    block_size: Annotated[int, Meta(ge=1, le=1024, description="tokens a KV block")] = 16
    num_kv_blocks: Annotated[
        Positive | None,
        Meta(
            description="KV blocks of the layers that keep every token; those with a sliding window get as many as "
            "they can use, at most so many too; default: from the memory budget"
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        Bytes | None,
        Meta(
            description="memory for the KV cache; default: 512 MiB on CPU (more if one sequence needs it), "
            "85 % of what is free on CUDA"
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Meta(
            description="what keys and values are kept in; auto: the dtype of the model, with quantization int8 float16"
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[
        bool | None,
        Meta(
            description="reuse the KV blocks of equal prompt beginnings; default: on, unless the cache is off or whole"
        ),
    ] = None
    enable_kv_cache: Annotated[
        bool, Meta(description="off: all tokens of a sequence are computed anew for each token, as a measure")
    ] = True
    kv_cache_reservation: Annotated[
        Literal["paged", "contiguous"],
        Meta(description="contiguous: a sequence holds blocks for the longest one from start to end, as a measure"),
    ] = "paged"

    def __post_init__(self) -> None:
        """Refuse what contradicts itself; a ValidationError where the Struct is decoded."""
        if self.enable_prefix_caching and not self.lasting:
            raise ValueError(
                "enable_prefix_caching: true: it needs enable_kv_cache true and kv_cache_reservation 'paged'; given: "
                f"{str(self.enable_kv_cache).lower()} and {self.kv_cache_reservation!r}"
            )

    @property
    def lasting(self) -> bool:
        """Whether blocks are held one by one for as long as their tokens are needed: only then can prefixes be shared,
        and blocks behind a window be let go of.
        """
        return self.enable_kv_cache and self.kv_cache_reservation == "paged"

    @property
    def shares_prefixes(self) -> bool:
        """Whether equal prompt beginnings share blocks."""
        return self.lasting if self.enable_prefix_caching is None else self.enable_prefix_caching


class SchedulerOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What runs in a step."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="sequences in one step")] = 128
    max_num_batched_tokens: Annotated[
        Positive | None, Meta(description="tokens in one step; default: 512 on CPU, 8192 on CUDA")
    ] = None
    long_prefill_token_threshold: Annotated[
        int, Meta(ge=0, lt=2**31, description="tokens of one prompt in one step while others wait; 0: half the budget")
    ] = 0
    mixed_prefill_token_threshold: Annotated[
        int,
        Meta(
            ge=0,
            lt=2**31,
            description="tokens of all prompts in one step beside sequences that generate, whose next token waits for "
            "them; 0: a sixteenth to a half of the budget, more beside more of them, most while more prompts wait",
        ),
    ] = 0
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], Meta(description="order of waiting requests; priority: smaller is more urgent")
    ] = "fcfs"
    batching: Annotated[
        Literal["continuous", "static"], Meta(description="static: a batch is full or done before the next one starts")
    ] = "continuous"
    async_scheduling: Annotated[bool, Meta(description="plan the next step while the last one runs")] = True
    max_num_queued_reqs: Annotated[Positive, Meta(description="waiting requests; one more is answered 429")] = 4096
    max_num_queued_tokens: Annotated[
        Positive, Meta(description="prompt tokens of waiting requests; one more is answered 429")
    ] = 16_777_216


class ExecutorOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The device."""

    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="auto: cuda where there is one")] = "auto"
    cpu_threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None, Meta(description="threads of a step on CPU; default: the cores")
    ] = None
    profile_file: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="file for a line of profile for each step, which then takes several times as long"),
    ] = None
    enforce_eager: Annotated[bool, Meta(description="run every step as it is: no graphs, no padding")] = False
    cuda_graph_sizes: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=4096)], ...],
        Meta(
            description="rows that steps of single tokens are padded to, each one CUDA graph (default: 1, 2, 4 .. 128 "
            "on CUDA; none on CPU, where the same padding can be asked for, and costs time)"
        ),
    ] = ()


class Deadlines(Struct, frozen=True, forbid_unknown_fields=True):
    """How long the engine waits, in seconds."""

    start_timeout: Annotated[float, Meta(gt=0, le=86400, description="seconds for the start, loading included")] = (
        1800.0
    )
    step_timeout: Annotated[float, Meta(gt=0, le=86400, description="seconds for one step; more counts as a hang")] = (
        300.0
    )


class RecoveryOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What follows when a process is lost."""

    max_restarts: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="replacements of a lost process in 10 minutes, of core and executor each; 0: end at once",
        ),
    ] = 3


RESTART_WINDOW_S = 600.0


class LogOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Log lines."""

    log_format: Annotated[
        LogFormat, Meta(description="of the lines that all processes write to stderr: for people, or one JSON object")
    ] = "text"


class TextFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """What the frontend read from the tokenizer and the generation config; not options.

    Attributes:
        eos_token_ids: ids that end a sequence.
        vocab_size: ids the tokenizer can decode; larger ones are never sampled. None: no tokenizer.
    """

    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int | None = None


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """All that core and executor are told."""

    version: Literal[1] = 1
    model: ModelOptions = ModelOptions()
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    executor: ExecutorOptions = ExecutorOptions()
    deadlines: Deadlines = Deadlines()
    recovery: RecoveryOptions = RecoveryOptions()
    log: LogOptions = LogOptions()
    text: TextFacts = TextFacts()


def config_hash(config: EngineConfig) -> str:
    """A digest of the configuration; peers compare it at hello.

    Raises:
        msgspec.ValidationError: a value is out of its range.
    """
    # Through the decoder first: 5 and 5.0 are one value of a float field, and must be one digest.
    settled = msgspec.convert(msgspec.to_builtins(config), EngineConfig)
    return hashlib.sha256(msgspec.json.encode(settled, order="deterministic")).hexdigest()[:16]


def write_config(config: EngineConfig, path: Path) -> None:
    """Write the configuration for a child to read; only the user may read it."""
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config)))


def read_config(path: Path) -> EngineConfig:
    """Read and validate what write_config wrote.

    Raises:
        ConfigInvalid: the file is missing, is no JSON, or a value is out of its range.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigInvalid(f"{path}: {error}") from error
