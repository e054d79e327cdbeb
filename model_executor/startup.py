"""From a configuration to an executor that can take plans."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from engine_core.wire.config import EngineConfig
from engine_core.wire.executor import ExecutorReady, KvGroup
from engine_core.wire.reports import LoadReport, Phase
from model_executor.attention.dispatch import Chooser, KernelTable
from model_executor.device import (
    DEFAULT_BATCHED_TOKENS,
    DTYPES,
    check_dtype,
    describe,
    free_memory,
    resolve_device,
    thread_count,
    use_threads,
)
from model_executor.errors import NativeUnavailable
from model_executor.graph_choice import NO_PROGRAM, GraphChoice, choose_graphs
from model_executor.kv_cache import KVCache, LayerShape, group_layers
from model_executor.marks import MarkedTable, mark_model
from model_executor.memory import GroupNeeds, PoolNeeds, size_pools
from model_executor.models.decoder import Decoder, build_model
from model_executor.models.spec import Dtype, ModelSpec, resolve_dtype
from model_executor.native.library import Native, load_native
from model_executor.native.program import Program, why_not
from model_executor.profiler import ProfiledRunner, StepProfiler
from model_executor.runner import Runner
from model_executor.slots import SlotLimits, Slots
from model_executor.weights.dummy import dummy_weights
from model_executor.weights.layer_plan import LayerPlan, choose_layers
from model_executor.weights.load import Progress, load_weights
from model_executor.weights.report import load_table

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Executor:
    """What came up.

    Attributes:
        runner: takes plans.
        ready: what the core is told.
        model: with its weights.
        plan: the blocks that the model holds.
        cache: of its blocks.
    """

    runner: Runner | ProfiledRunner
    ready: ExecutorReady
    model: Decoder
    plan: LayerPlan
    cache: KVCache


class PhaseClock:
    """Seconds spent in each phase of the start.

    Args:
        began: monotonic time at which the start began.
        progress: told when a phase begins and ends.
    """

    def __init__(self, began: float, progress: Progress) -> None:
        self.seconds: dict[Phase, float] = {"start": time.monotonic() - began}
        self._progress = progress

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Announce and measure what is done inside."""
        self._progress(name, 0, 1, "steps")
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began
        self._progress(name, 1, 1, "steps")


def bring_up(
    config: EngineConfig,
    spec: ModelSpec,
    epoch: int,
    clock: PhaseClock,
    progress: Progress,
    *,
    table: KernelTable | None = None,
) -> Executor:
    """Build the model, load it, allocate the cache and warm up.

    Args:
        config: of the engine.
        spec: of the model that config.model names.
        epoch: incarnation of this executor.
        clock: measures the phases.
        progress: of the load.
        table: the kernels to choose from; None: all.

    Raises:
        ModelRefused: model, device, dtype or memory cannot be honoured.
    """
    device = resolve_device(config.executor)
    if device.type == "cpu":
        log.info("computing with %d threads", use_threads(config.executor.cpu_threads))
    progress("plan", 0, 1, "steps")
    began = time.monotonic()
    dtype_name = resolve_dtype(config.model.dtype, spec, device.type)
    dtype = DTYPES[dtype_name]
    check_dtype(dtype, device)
    plan = choose_layers(spec, config.model)
    planned = time.monotonic()
    profiler = _profiler(config, device)
    native = _native(config, device)
    table = table or (KernelTable if profiler is None else MarkedTable)(native=native)
    cache_dtype_name = _cache_dtype(config, dtype_name)
    cache_dtype = DTYPES[cache_dtype_name]
    # The native kernels keep numbers narrow and compute in float32, where nothing overflows.
    computed = dtype if native is None else torch.float32
    choose = Chooser(
        *(table, computed, device, config.cache.block_size),
        int8=config.model.quantization == "int8",
        cache_dtype=cache_dtype,
    )
    model = build_model(spec, plan, choose)
    if native is not None and table.all_native(native):
        # Two pools of threads on the same cores wait for each other; what is left to torch is small.
        torch.set_num_threads(1)
    built = time.monotonic()
    report = _load(config, model, spec, plan, progress, None if computed == dtype else dtype)
    # The loader announces the end of the planning and the whole of the reading, and measures both.
    clock.seconds["plan"] = planned - began + report.seconds["plan"]
    clock.seconds["build"] = built - planned
    clock.seconds["load"] = report.seconds["read"]
    for line in load_table(report):
        log.info("%s", line)
    with clock.phase("pack"):
        model.pack()
    with clock.phase("kv_cache"):
        groups, cache = _cache(config, spec, plan, cache_dtype, device)
        slots = Slots(_limits(config, spec, cache), device)
    runner, graphs = _runner(config, spec, model, cache, slots, native, device)
    if profiler is not None:
        mark_model(model, plan)
    refused = _warm_up(runner, profiler, clock, progress)
    ready = ExecutorReady(
        epoch=epoch,
        max_model_len=spec.max_model_len,
        vocab_size=spec.vocab_size,
        dtype=dtype_name,
        kv_cache_dtype=cache_dtype_name,
        device=describe(device),
        kv_groups=groups,
        max_num_batched_tokens=_batched_tokens(config, device),
        load=report,
        kernels=table.explain(),
        startup_s=clock.seconds,
        memory={"weights": weight_bytes(model), "kv_cache": cache.nbytes, "buffers": slots.nbytes},
        graphs=graphs.report(refused),
    )
    log.info("start in seconds: %s", ", ".join(f"{name} {spent:.3f}" for name, spent in clock.seconds.items()))
    log.info("memory in bytes: %s", ", ".join(f"{name} {size}" for name, size in ready.memory.items()))
    return Executor(
        runner=runner if profiler is None else ProfiledRunner(runner, profiler),
        ready=ready,
        model=model,
        plan=plan,
        cache=cache,
    )


def _runner(
    config: EngineConfig,
    spec: ModelSpec,
    model: Decoder,
    cache: KVCache,
    slots: Slots,
    native: Native | None,
    device: torch.device,
) -> tuple[Runner, GraphChoice]:
    """The runner, and how it runs steps of single tokens."""
    tokens = _batched_tokens(config, device)
    rows = min(config.scheduler.max_num_seqs, tokens)
    refusal = NO_PROGRAM if native is None else why_not(model)
    graphs = choose_graphs(
        config.executor, device.type, waits_for_device=model.waits_for_device, max_rows=rows, program=refusal
    )
    program = None
    if native is not None and refusal is None and not config.executor.enforce_eager:
        program = Program(native, model, cache, tokens, rows)
    runner = Runner(
        *(model, cache, slots),
        sample_vocab_size=_sample_vocab_size(config, spec),
        max_num_batched_tokens=tokens,
        buckets=graphs.buckets,
        program=program,
    )
    return runner, graphs


def _warm_up(runner: Runner, profiler: StepProfiler | None, clock: PhaseClock, progress: Progress) -> str | None:
    """First runs and captures; gives why there will be no graphs, if that was found out."""

    def capture() -> str | None:
        return runner.capture(lambda done, total: progress("capture", done, total, "steps"))

    refused = None
    with clock.phase("warm_up"):
        runner.warm_up() if profiler is None else profiler.run(runner.warm_up, None)
    if runner.captures:
        began = time.monotonic()
        refused = capture() if profiler is None else profiler.run(capture, None)
        clock.seconds["capture"] = time.monotonic() - began
    began = time.monotonic()
    runner.warm_up()
    clock.seconds["warm_run"] = time.monotonic() - began
    return refused


def _native(config: EngineConfig, device: torch.device) -> Native | None:
    """The library of native kernels; without one torch computes, which is several times slower."""
    if device.type != "cpu":
        return None
    try:
        return load_native(thread_count(config.executor.cpu_threads))
    except NativeUnavailable as error:
        log.warning("no native kernels, torch computes instead: %s", error)
        return None


def _profiler(config: EngineConfig, device: torch.device) -> StepProfiler | None:
    path = config.executor.profile_file
    return None if path is None else StepProfiler(Path(path), device)


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of parameters and buffers; what two of them share counts once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _load(
    config: EngineConfig,
    model: Decoder,
    spec: ModelSpec,
    plan: LayerPlan,
    progress: Progress,
    rounded: torch.dtype | None,
) -> LoadReport:
    folder = Path(config.model.model)
    if config.model.load_format == "dummy":
        return dummy_weights(model, spec, plan, folder, config.model.seed, progress, rounded=rounded)
    return load_weights(model, spec, plan, folder, progress, rounded=rounded)


def _cache_dtype(config: EngineConfig, dtype: Dtype) -> Dtype:
    asked = config.cache.kv_cache_dtype
    if asked != "auto":
        return asked
    return "float16" if config.model.quantization == "int8" else dtype


def _batched_tokens(config: EngineConfig, device: torch.device) -> int:
    return config.scheduler.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS[device.type]


def _cache(
    config: EngineConfig, spec: ModelSpec, plan: LayerPlan, dtype: torch.dtype, device: torch.device
) -> tuple[list[KvGroup], KVCache]:
    size = config.cache.block_size
    layers = [layer.attention for layer in plan.layers(spec)]
    shapes = [LayerShape.of(layer) for layer in layers]
    windows, group_of = group_layers([layer.window for layer in layers], spec.max_model_len)
    token_bytes = [0] * len(windows)
    for group, shape in zip(group_of, shapes, strict=True):
        token_bytes[group] += shape.token_bytes(dtype)
    needs = PoolNeeds(
        groups=tuple(map(GroupNeeds, windows, (size * count for count in token_bytes))),
        block_size=size,
        max_model_len=spec.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=_batched_tokens(config, device),
    )
    groups = size_pools(config.cache, needs, device.type, lambda: free_memory(device))
    for pool, need in zip(groups, needs.groups, strict=True):
        reach = "" if pool.window is None else f", for the layers with a window of {pool.window}"
        log.info("KV cache: %d blocks of %d tokens, %d bytes a block%s", pool.num_blocks, size, need.block_bytes, reach)
    pools = tuple(pool.num_blocks for pool in groups)
    return groups, KVCache.allocate_groups(shapes, pools, group_of, size, dtype, device)


def _limits(config: EngineConfig, spec: ModelSpec, cache: KVCache) -> SlotLimits:
    return SlotLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=spec.max_model_len,
        block_size=cache.block_size,
        num_blocks=cache.pools,
        vocab_size=spec.vocab_size,
        sample_vocab_size=_sample_vocab_size(config, spec),
        eos_token_ids=config.text.eos_token_ids,
    )


def _sample_vocab_size(config: EngineConfig, spec: ModelSpec) -> int:
    """Rows of the head beyond the tokenizer are padding: nothing could decode them."""
    return min(spec.vocab_size, config.text.vocab_size or spec.vocab_size)
