"""How fast: a Llama-3-8B-shaped model against the memory's speed, with what it is to reach, and single kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model_executor.attention.triton_paged import TritonPaged
from tests.gpu.cases import Shape, build
from tests.gpu.models import LLAMA_8B, SMALL, Model, Sizes, batch_of, decode_batch, make, weights
from tests.gpu.report import Report, copy_bandwidth, graph_ms, median_ms, synchronize

CONTEXT = 1024
# By rows: what a decode step is to reach of the speed at which memory is copied.
SHARES = {1: 0.8, 64: 0.7}
LONGEST_GAP_US = 20.0


@dataclass(frozen=True)
class Plan:
    """Sizes of the run; tiny ones for a dry run."""

    sizes: Sizes
    rows: tuple[int, ...]
    context: int
    prompts: tuple[tuple[int, int], ...]
    repeats: int
    square: int
    dtype: torch.dtype

    @classmethod
    def of(cls, *, dry: bool) -> Plan:
        """For the device or for a dry run."""
        if dry:
            return cls(SMALL, (1, 2), 40, ((1, 64),), 2, 64, torch.float32)
        prompts = ((1, 8192), (8, 1024), (1, 512))
        return cls(LLAMA_8B, (1, 64), CONTEXT, prompts, 30, 8192, torch.bfloat16)


@torch.inference_mode()
def model(report: Report, shard: int, shards: int) -> None:
    """Decode against weights and KV over the copy bandwidth; the gap between replays; prefill."""
    plan = Plan.of(dry=report.dry)
    bandwidth = copy_bandwidth(report)
    peak = _matrix_rate(report, plan)
    began = time.perf_counter()
    blocks = plan.rows[-1] * (-(-plan.context // 16) + 1) + max(count * length for count, length in plan.prompts) // 16
    made = make(plan.sizes, blocks, dtype=plan.dtype, device=report.device)
    synchronize(report.device)
    report.note("weights and cache drawn", f"{time.perf_counter() - began:.1f} s, {_weight_bytes(made) / 1e9:.2f} GB")
    _check_kernels(report, made)
    for rows in plan.rows:
        _decode(report, plan, made, rows, bandwidth)
    for count, length in plan.prompts:
        _prefill(report, plan, made, count, length, peak)
    _profile(report, plan, made)


def _check_kernels(report: Report, made: Model) -> None:
    """What was chosen for the model, and on a device that no operator between its products fell back to torch."""
    chosen = {(choice.operator, choice.chosen): choice for choice in made.kernels}
    for (operator, name), choice in chosen.items():
        report.note(f"operator {operator}", f"{name} for {choice.problem}")
    wanted = {("norm", "triton_norm"), ("heads", "triton_heads"), ("linear", "matmul_triton_gate")}
    missing = {*wanted, ("attention", "triton_paged")} - chosen.keys()
    text = ", ".join(f"{operator}: no {name}" for operator, name in sorted(missing)) or "all in Triton"
    _reach(report, "kernels of the model", text, passed=not missing)


def _matrix_rate(report: Report, plan: Plan) -> float:
    a, b = (torch.randn(plan.square, plan.square, dtype=plan.dtype, device=report.device) for _ in range(2))
    ms = median_ms(lambda: a @ b, report.device, repeats=plan.repeats)
    rate = 2 * plan.square**3 / ms * 1e3
    report.note(f"product of {plan.square} x {plan.square} matrices", f"{rate / 1e12:.1f} TFLOP/s")
    return rate


def _weight_bytes(made: Model) -> int:
    """What a decode step reads of the weights: all but the embedding, of which it takes a row a token."""
    return sum(weight.nbytes for weight in weights(made.decoder).values()) - made.decoder.embedding.weight.nbytes


def _decode(report: Report, plan: Plan, made: Model, rows: int, bandwidth: float) -> None:
    batch = decode_batch([plan.context] * rows, made.cache, plan.sizes.vocab, seed=rows)
    graphs = made.graphs((rows,))
    began = time.perf_counter()
    graphs.run(batch)
    synchronize(report.device)
    first = time.perf_counter() - began
    eager = median_ms(lambda: made.step(batch), report.device, repeats=max(plan.repeats // 6, 1))
    single = median_ms(lambda: graphs.run(batch), report.device, repeats=plan.repeats)
    many = max(plan.repeats, 2)
    chained = median_ms(_times(many, lambda: graphs.run(batch)), report.device, repeats=3, warm_ups=1) / many
    host = _host_ms(many, lambda: graphs.run(batch), report.device)
    sizes = plan.sizes
    token = 2 * sizes.kv_heads * sizes.head_dim * sizes.layers * plan.dtype.itemsize
    floor = (_weight_bytes(made) + rows * plan.context * token) / bandwidth * 1e3
    _reach(
        report,
        f"decode {rows} rows, context {plan.context}",
        f"{chained:.3f} ms a step, {rows / chained * 1e3:.0f} tokens/s, {floor / chained:.1%} of the memory's speed"
        f" (floor {floor:.3f} ms)",
        passed=floor / chained >= SHARES[rows] if rows in SHARES else None,
    )
    report.note(
        f"decode {rows} rows, by parts",
        f"one replay alone {single:.3f} ms, as it is {eager:.3f} ms, the host's part {host:.3f} ms,"
        f" capture and first replay {first:.2f} s",
    )
    _gap(report, made, batch_rows=rows, plan=plan)


def _gap(report: Report, made: Model, *, batch_rows: int, plan: Plan) -> None:
    """What lies between replays: steps with their inputs written, less the bare graph, in turn."""
    if report.device.type != "cuda":
        return
    batch = decode_batch([plan.context] * batch_rows, made.cache, plan.sizes.vocab, seed=batch_rows)
    bare = torch.cuda.CUDAGraph()
    made.step(batch)
    with torch.cuda.graph(bare):
        kept = made.step(batch)
    graphs = made.graphs((batch_rows,))
    works = (_times(plan.repeats, bare.replay), _times(plan.repeats, lambda: graphs.run(batch)))
    pairs = [[median_ms(work, report.device, repeats=1, warm_ups=1) for work in works] for _ in range(5)]
    gap = sorted((whole - alone) / plan.repeats * 1e3 for alone, whole in pairs)[len(pairs) // 2]
    text = f"{gap:.1f} us of {pairs[0][1] / plan.repeats * 1e3:.0f} us"
    _reach(report, f"gap between replays, {batch_rows} rows", text, passed=gap <= LONGEST_GAP_US)
    del kept


def _reach(report: Report, name: str, text: str, *, passed: bool | None) -> None:
    """A figure, which on a device decides where it has a bound."""
    if passed is None or report.dry:
        report.note(name, text)
    else:
        report.check(name, passed, text)


def _times(count: int, work: Callable[[], object]) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(count):
            work()

    return repeated


def _host_ms(count: int, work: Callable[[], object], device: torch.device) -> float:
    """What the host needs to queue one call."""
    synchronize(device)
    began = time.perf_counter()
    _times(count, work)()
    taken = time.perf_counter() - began
    synchronize(device)
    return taken / count * 1e3


def _prefill(report: Report, plan: Plan, made: Model, count: int, length: int, peak: float) -> None:
    starts, counts = np.zeros(count, dtype=np.int64), np.full(count, length, dtype=np.int64)
    batch = batch_of(starts, counts, made.cache, plan.sizes.vocab, seed=length)
    ms = median_ms(lambda: made.step(batch), report.device, repeats=5, warm_ups=2)
    sizes, tokens = plan.sizes, count * length
    named = weights(made.decoder)
    linear = sum(weight.numel() for name, weight in named.items() if name.startswith("blocks.") and weight.ndim == 2)
    attention = 2 * sizes.layers * sizes.heads * sizes.head_dim * length * length * count
    work = 2 * linear * tokens + attention
    report.note(
        f"prefill {count} x {length} tokens",
        f"{ms:.2f} ms, {tokens / ms * 1e3:.0f} tokens/s, {work / ms / 1e9:.0f} TFLOP/s, {work / ms * 1e3 / peak:.0%}"
        " of the matrix product's rate",
    )


def _profile(report: Report, plan: Plan, made: Model) -> None:
    """Where the time of a decode step goes, by kernel."""
    if report.device.type != "cuda":
        return
    rows = plan.rows[-1]
    batch = decode_batch([plan.context] * rows, made.cache, plan.sizes.vocab, seed=rows)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        made.step(batch)
        synchronize(report.device)
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    launches = sum(event.count for event in events)
    report.note(f"step of {rows} rows", f"{launches} launches, {launches / plan.sizes.layers:.1f} a layer")
    for event in events[:12]:
        share = event.self_device_time_total / total
        name = " ".join(event.key.split())[:70]
        report.note(
            f"step of {rows} rows: {share:.1%}", f"{event.count} x {name}, {event.self_device_time_total:.0f} us"
        )


@torch.inference_mode()
def kernel_speed(report: Report, shard: int, shards: int) -> None:
    """Attention against its bytes and operations; both layouts of a linear map."""
    bandwidth = copy_bandwidth(report)
    if report.dry:
        _decode_speed(report, 1, 64, bandwidth)
        _linear_speed(report, 2, 64, 128, bandwidth)
        return
    for rows, context in ((1, 1024), (1, 32768), (8, 1024), (64, 1024)):
        _decode_speed(report, rows, context, bandwidth)
    for count, length in ((1, 8192), (8, 1024), (64, 128)):
        _prefill_speed(report, count, length)
    for inputs, outputs in ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256)):
        for tokens in (1, 64):
            _linear_speed(report, tokens, inputs, outputs, bandwidth)


def _decode_speed(report: Report, rows: int, context: int, bandwidth: float) -> None:
    shape = Shape(((context - 1, 1),) * rows, 32, 8, 128, dtype=torch.bfloat16)
    case = build(shape, report.device, seed=0)
    kernel = TritonPaged(case.problem)
    work = partial(kernel.forward, case.query, case.cache, case.batch)
    ms = graph_ms(work, report.device, count=1 if report.dry else 20)
    read = rows * context * shape.kv_heads * shape.head_dim * 2 * shape.dtype.itemsize
    rate = read / ms * 1e3
    report.note(
        f"decode attention {rows} x {context}", f"{ms * 1e3:.1f} us, {rate / 1e12:.2f} TB/s, {rate / bandwidth:.0%}"
    )


def _prefill_speed(report: Report, count: int, length: int) -> None:
    shape = Shape(((0, length),) * count, 32, 8, 128, dtype=torch.bfloat16)
    case = build(shape, report.device, seed=0)
    kernel = TritonPaged(case.problem)
    ours = median_ms(lambda: kernel.forward(case.query, case.cache, case.batch), report.device)
    size = (count, shape.heads, length, shape.head_dim)
    query = torch.randn(size, dtype=shape.dtype, device=report.device)
    key, value = (torch.randn((count, 8, *size[2:]), dtype=shape.dtype, device=report.device) for _ in range(2))

    def dense() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    theirs = median_ms(dense, report.device)
    work = 2 * count * shape.heads * shape.head_dim * length * length
    report.note(
        f"prefill attention {count} x {length}",
        f"{ours:.3f} ms, {work / ours / 1e9:.0f} TFLOP/s; torch on dense keys {theirs:.3f} ms",
    )


def _linear_speed(report: Report, tokens: int, inputs: int, outputs: int, bandwidth: float) -> None:
    """x @ w with w as (in, out), as the model has it, and as (out, in). Weights rotate, so that no cache holds them."""
    dtype, device = torch.bfloat16, report.device
    copies = 1 if report.dry else max(1, min(8, 2**30 // (inputs * outputs * 2)))
    x = torch.randn(tokens, inputs, dtype=dtype, device=device)
    ours = [torch.randn(inputs, outputs, dtype=dtype, device=device) for _ in range(copies)]
    theirs = [torch.randn(outputs, inputs, dtype=dtype, device=device) for _ in range(copies)]
    first = graph_ms(lambda: [x @ w for w in ours], device, count=1) / copies
    second = graph_ms(lambda: [F.linear(x, w) for w in theirs], device, count=1) / copies
    floor = inputs * outputs * dtype.itemsize / bandwidth * 1e3
    report.note(
        f"linear {tokens} x {inputs} -> {outputs}",
        f"(in, out) {first * 1e3:.1f} us, {floor / first:.0%}; (out, in) {second * 1e3:.1f} us, {floor / second:.0%}",
    )
