"""`python -m model_executor.tools.probe MODEL [--layers ...] --json FILE`: a look into a brought-up executor.

It checks shape, layout, aliasing and ownership of every tensor, the size of the runtime state, that all numbers are
finite and that routing keeps its invariants; and it times single blocks and borders over several runs.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

import torch
from msgspec import structs
from torch import Tensor, nn

from engine_core.wire.evidence import Check, ProbeReport, StepMode, Timing
from engine_core.wire.executor import Row, StepResult
from model_executor.device import DTYPES
from model_executor.layers.routing import Router, Routing
from model_executor.models.registry import family
from model_executor.tools.command import Parser, run_tool
from model_executor.tools.evidence_file import add_json_flag, write_json
from model_executor.tools.observe import EMBEDDING, FINAL_NORM, Observer, block_names
from model_executor.tools.offline import Offline, OfflineOptions
from model_executor.tools.pack import make_pack
from model_executor.tools.run_flags import add_run_flags, add_vocab_flag, run_options
from model_executor.weights.parameters import plan_parameters

Kind = Literal["prefill", "decode"]
KINDS: Final[tuple[Kind, ...]] = ("prefill", "decode")
HEAD: Final = "head"
REST: Final = "rest: batch, sampling with log-probabilities, result"
WHOLE_STEP: Final = "whole step"
PREFILL_TOKENS: Final = 64
CONTEXT: Final = 128
WARM_UPS: Final = 2
RUNS: Final = 5
PRESSURE: Final = Path("/proc/pressure/cpu")
TOTAL: Final = re.compile(r"^some .*total=(\d+)$", re.MULTILINE)


def probe(options: OfflineOptions) -> ProbeReport:
    """Check and time: whole steps as production runs them, single places in eager steps."""
    offline = Offline(options)
    checks = [_tensors(offline), _ownership(offline), _state(offline), *_numbers(offline)]
    with Waiting() as waiting:
        whole = [_whole_step(offline, kind) for kind in KINDS]
        # Within a replay no place can be seen.
        eager = Offline(structs.replace(options, eager=True)) if _padded(whole) else offline
        places = [timing for kind in KINDS for timing in _timings(eager, kind)]
    return ProbeReport(
        identity=offline.identity,
        environment=offline.environment,
        checks=checks,
        timings=[*places, *whole],
        waited=waiting.share,
    )


class Waiting:
    """Measures within a `with` for how long somebody on this machine waited for a processor.

    Attributes:
        share: of the time, 0 .. 1, after the `with`; None: the system does not tell.
    """

    def __init__(self) -> None:
        self.share: float | None = None

    def __enter__(self) -> Waiting:
        self._before, self._began = waited_us(), time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        after, spent = waited_us(), time.monotonic() - self._began
        if self._before is not None and after is not None:
            self.share = min(1.0, (after - self._before) / (1e6 * spent))


def waited_us(path: Path = PRESSURE) -> int | None:
    """Microseconds since the start of the system in which somebody waited for a processor; None: it does not tell."""
    try:
        found = TOTAL.search(path.read_text(encoding="ascii"))
    except OSError:
        return None
    return None if found is None else int(found[1])


def _padded(timings: Sequence[Timing]) -> bool:
    return any(timing.mode != "eager" for timing in timings)


def _tensors(offline: Offline) -> Check:
    """Every parameter has the shape and dtype that planning gave it, and lies contiguous."""
    model, plan = offline.executor.model, offline.executor.plan
    names = family(offline.spec.architecture).names
    wanted = {each.name: each for each in plan_parameters(offline.spec, plan, names)}
    dtype = model.embedding.weight.dtype
    there = dict(model.named_parameters())
    packed = {name for name in wanted.keys() - there.keys() if _is_packed(model, name)}
    faults = [f"{name}: planned and not built" for name in sorted(wanted.keys() - there.keys() - packed)]
    for name, parameter in there.items():
        planned = wanted.get(name)
        # A head of its own where the checkpoint's differs from the tied embedding is planned during the load.
        shape = tuple(parameter.shape) if planned is None else planned.shape
        kept = dtype if planned is None or planned.dtype is None else DTYPES[planned.dtype]
        if tuple(parameter.shape) != shape or parameter.dtype != kept or not parameter.is_contiguous():
            faults.append(f"{name}: {tuple(parameter.shape)} {parameter.dtype}, planned {shape} {kept}")
    good = f"{len(there)} parameters as planned, contiguous"
    if packed:
        good += f"; {len(packed)} in the form of the kernels that compute with them"
    good += f"; {offline.executor.ready.memory['weights']} bytes in all"
    return Check("tensor shape and layout", not faults, _told(faults, good))


def _is_packed(model: nn.Module, name: str) -> bool:
    """Whether a kernel keeps the weight of this parameter in a form of its own."""
    return getattr(model.get_submodule(name.rpartition(".")[0]), "packed", None) is not None


def _ownership(offline: Offline) -> Check:
    """No two parameters and no two layers' caches share memory."""
    model, cache = offline.executor.model, offline.executor.cache
    owners: dict[int, list[str]] = defaultdict(list)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        owners[tensor.untyped_storage().data_ptr()].append(name)
    for index, layer in enumerate(cache.layers):
        for name, tensor in (("key", layer.key), ("value", layer.value)):
            if tensor.numel():
                owners[tensor.untyped_storage().data_ptr()].append(f"cache of runtime layer {index}: {name}")
    shared = [" and ".join(names) for names in owners.values() if len(names) > 1]
    head = "the head is the embedding's table" if model.tied else "the head has a table of its own"
    return Check("aliasing and ownership", not shared, _told(shared, f"{len(owners)} tensors, no two share; {head}"))


def _state(offline: Offline) -> Check:
    """The cache has a layer for each block that runs, of that block's size, and no more."""
    executor = offline.executor
    cache, layers = executor.cache, executor.plan.layers(offline.spec)
    itemsize = DTYPES[executor.ready.kv_cache_dtype].itemsize
    # A block more for padding.
    rows = [(cache.pools[group] + 1) * cache.block_size for group in cache.group_of]
    wanted = [layer.attention.kv_elements * itemsize * count for layer, count in zip(layers, rows, strict=True)]
    there = [layer.key.nbytes + layer.value.nbytes for layer in cache.layers]
    faults = [] if wanted == there else [f"bytes by layer {there}, planned {wanted}"]
    good = f"{len(there)} layers of cache for {len(layers)} blocks, {sum(there)} bytes as planned"
    return Check("right-sized runtime state", not faults, _told(faults, good))


def _numbers(offline: Offline) -> Iterator[Check]:
    """Finite numbers at every border, and routing as it must be, over the pack."""
    model, plan = offline.executor.model, offline.executor.plan
    routings: list[tuple[Router, Routing]] = []
    finite: list[str] = []
    count = 0
    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, Router):
                hooks.callback(module.register_forward_hook(_keep_routing(routings)).remove)
        names = block_names(plan.sources, plan.classes)
        seen = hooks.enter_context(Observer(list(model.blocks), model.norm, names))
        for entry in make_pack(offline.sample_vocab, offline.executor.ready.max_model_len, 5):
            offline.force([*entry.prompt, *entry.prompt[:4]], len(entry.prompt), 16)
            values = seen.take()
            count += sum(value.numel() for value in values.values())
            finite += [f"{entry.name}: {place}" for place, value in values.items() if not _is_finite(value)]
    yield Check("finite outputs", not finite, _told(finite, f"{count} numbers at the borders of all blocks are finite"))
    faults = [fault for router, routing in routings for fault in routing_faults(router, routing)]
    good = (
        f"{sum(r.experts.shape[0] for _, r in routings)} choices of experts keep them"
        if routings
        else "no block routes"
    )
    yield Check("routing invariants", not faults, _told(faults, good))


def routing_faults(router: Router, routing: Routing) -> list[str]:
    """What is wrong with a choice: experts outside, named twice, weights not finite, negative, or of another sum."""
    spec = router.spec
    experts, weights = routing.experts, routing.weights
    faults = []
    if int(experts.min()) < 0 or int(experts.max()) >= spec.num_experts:
        faults.append(f"an expert outside 0 .. {spec.num_experts - 1}")
    if bool((experts.sort(-1).values.diff(dim=-1) == 0).any()):
        faults.append("a token names an expert twice")
    if not _is_finite(weights) or bool((weights < 0).any()):
        faults.append("a weight that is not finite or is negative")
    # The sum is that of top_k rounded quotients.
    rounding = 8 * torch.finfo(weights.dtype).eps * spec.scale
    if spec.normalize and bool(((weights.sum(-1) - spec.scale).abs() > rounding).any()):
        faults.append(f"weights of a token that do not sum to {spec.scale:g}")
    return faults


def _keep_routing(kept: list[tuple[Router, Routing]]) -> Callable[[nn.Module, object, object], None]:
    def hook(module: nn.Module, _inputs: object, output: object) -> None:
        assert isinstance(module, Router)
        assert isinstance(output, Routing)
        kept.append((module, Routing(output.experts.cpu(), output.weights.cpu())))

    return hook


def _is_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())


def _told(faults: Sequence[str], good: str) -> str:
    return "; ".join(faults[:8]) if faults else good


class TimedStep:
    """A step of one sequence, to be repeated: its first tokens, or one token after many.

    Args:
        offline: that runs it.
        kind: of the step.

    Attributes:
        count, context: tokens computed, and in the cache after it.
    """

    def __init__(self, offline: Offline, kind: Kind) -> None:
        self._offline = offline
        length = min(CONTEXT, offline.executor.ready.max_model_len)
        self._tokens = [place % offline.sample_vocab for place in range(length)]
        self._start = 0 if kind == "prefill" else length - 1
        self.count = min(PREFILL_TOKENS, length) if kind == "prefill" else 1
        self.context = self._start + self.count
        if kind == "decode":
            offline.force(self._tokens, length - 1, length)

    def run(self) -> StepResult:
        """Once more."""
        fill = self._offline.fill(self._tokens)
        return self._offline.step([fill], [Row(fill.slot, self._start, self.count, [], True)])


def _whole_step(offline: Offline, kind: Kind) -> Timing:
    """Seconds of a step from plan to result, as production runs it."""
    step = TimedStep(offline, kind)
    seconds = []
    for _ in range(WARM_UPS + RUNS):
        began = time.perf_counter()
        result = step.run()
        seconds.append(time.perf_counter() - began)
    cuda = offline.executor.model.embedding.weight.device.type == "cuda"
    mode: StepMode = "eager" if not result.bucket else "graph" if cuda else "buffers"
    return _timing(WHOLE_STEP, kind, mode, step, seconds[WARM_UPS:])


def _timings(offline: Offline, kind: Kind) -> list[Timing]:
    """Seconds of each place in an eager step, and of all else in it."""
    model, plan = offline.executor.model, offline.executor.plan
    places = [EMBEDDING, *block_names(plan.sources, plan.classes), FINAL_NORM, HEAD]
    modules = [model.embedding, *model.blocks, model.norm, model.head]
    taken: dict[str, list[float]] = {place: [] for place in places}
    rest: list[float] = []
    step = TimedStep(offline, kind)
    with ExitStack() as hooks:
        for run in range(WARM_UPS + RUNS):
            if run == WARM_UPS:
                for place, module in zip(places, modules, strict=True):
                    _clock(module, taken[place], hooks, model.embedding.weight.device)
            began = time.perf_counter()
            step.run()
            spent = time.perf_counter() - began
            if run >= WARM_UPS:
                rest.append(spent - sum(seconds[-1] for seconds in taken.values()))
    return [_timing(place, kind, "eager", step, seconds) for place, seconds in [*taken.items(), (REST, rest)]]


def _timing(place: str, kind: Kind, mode: StepMode, step: TimedStep, seconds: Sequence[float]) -> Timing:
    return Timing(
        place=place,
        kind=kind,
        mode=mode,
        tokens=step.count,
        context=step.context,
        median=statistics.median(seconds),
        low=min(seconds),
        high=max(seconds),
        runs=len(seconds),
    )


def _clock(module: nn.Module, taken: list[float], hooks: ExitStack, device: torch.device) -> None:
    """Have the module's passes timed; on a device each waits for its end, so that a pass is its own."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def enter(*_: object) -> None:
        taken.append(now())

    def leave(*_: object) -> None:
        taken[-1] = now() - taken[-1]

    hooks.callback(module.register_forward_pre_hook(enter).remove)
    hooks.callback(module.register_forward_hook(leave).remove)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; gives the exit status."""
    parser = _parser()

    def act(arguments: Sequence[str]) -> None:
        args = parser.parse_args(arguments)
        report = probe(_options(args))
        write_json(args.json, report)
        for check in report.checks:
            sys.stdout.write(f"{'pass' if check.passed else 'FAIL'} {check.name}: {check.evidence}\n")
        for row in report.timings:
            sys.stdout.write(f"{row.kind} {row.mode} {row.place}: {1000 * row.median:.3f} ms\n")

    return run_tool("tercet report", act, argv)


def _options(args: argparse.Namespace) -> OfflineOptions:
    return structs.replace(run_options(args), length=CONTEXT + 1, sequences=1, sample_vocab=args.sample_vocab)


def _parser() -> Parser:
    parser = Parser(prog="tercet report", description="Look into an executor that the production path brought up.")
    add_run_flags(parser)
    add_vocab_flag(parser)
    add_json_flag(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
