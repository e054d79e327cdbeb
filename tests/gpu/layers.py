"""The kernels between products and attention, on the device: against torch, and against the bytes that they move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from model_executor.layers.linear import LinearProblem, gated
from model_executor.layers.norm import NormProblem, TorchNorm
from model_executor.layers.triton_gated import TritonGate
from model_executor.layers.triton_heads import TritonHeads
from model_executor.layers.triton_norm import TritonNorm
from model_executor.models.spec import Activation
from tests.gpu.layer_cases import HEADS_SHAPES, HeadsCase, HeadsShape, build_heads
from tests.gpu.report import Report, copy_bandwidth, graph_ms
from tests.gpu.rounding import ON_DEVICE, unlike

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, F16, F32)
SIZES = {BF16: (64, 576, 4096, 5376, 16384), F16: (576, 16384), F32: (576, 16384)}
# gelu adds 1 to what is close to -1.
NOISE = 1e-5
# The parts of a Llama-3-8B-shaped layer.
HIDDEN, WIDTH = 4096, 14336
HEADS = HeadsShape(32, 8, 128, BF16, rotary=128)
ROWS = (1, 64, 2048)
Checks = Iterator[tuple[str, str | None]]
# Checks that need the same compiled kernels.
Unit = Callable[[torch.device], Checks]


@torch.inference_mode()
def layers(report: Report, shard: int, shards: int) -> None:
    """Every kernel in every dtype, on one token, some and many."""
    units = [*_norm_units(dry=report.dry), *_heads_units(dry=report.dry), *_gate_units(dry=report.dry)]
    for unit in units[shard::shards]:
        for name, fault in unit(report.device):
            report.check(name, fault is None, fault or "as torch")


def _norm_units(*, dry: bool) -> Iterator[Unit]:
    rows = (3,) if dry else ROWS[:2]
    for dtype in DTYPES:
        for size in SIZES[dtype][:1] if dry else SIZES[dtype]:
            for offset in (False, True):
                yield partial(_norms, NormProblem("", dtype, size, offset, 1e-6), rows)


def _norms(problem: NormProblem, rows: tuple[int, ...], device: torch.device) -> Checks:
    problem = replace(problem, device=device.type)
    faults = [_norm_fault(problem, count, device) for count in rows]
    yield f"norm of {problem}", next(filter(None, faults), None)


def _norm_fault(problem: NormProblem, rows: int, device: torch.device) -> str | None:
    x, added, weight = (_drawn((count, problem.size), problem.dtype, device) for count in (rows, rows, 1))
    x[0, ::7] = float("inf")
    ours, theirs, total = TritonNorm(problem), TorchNorm(problem), x + added
    fault = unlike(ours.forward(x, weight[0]), theirs.forward(x, weight[0]), ON_DEVICE)
    fault = fault or unlike(ours.forward(x, weight[0], added), theirs.forward(total, weight[0]), ON_DEVICE)
    return fault or unlike(x, total, 0.0)


def _heads_units(*, dry: bool) -> Iterator[Unit]:
    for shape in HEADS_SHAPES[1:2] if dry else (*HEADS_SHAPES, HEADS):
        yield partial(_heads, shape, (2,) if dry else (1, 64, 3000))


def _heads(shape: HeadsShape, counts: tuple[int, ...], device: torch.device) -> Checks:
    for tokens in counts:
        for broken in (False, True):
            case = build_heads(shape, tokens, device, seed=tokens, broken=broken)
            yield f"heads {shape}, {tokens} tokens{', broken' * broken}", _heads_fault(case)


def _heads_fault(case: HeadsCase) -> str | None:
    ours, theirs = case.cache(), case.cache()
    pairs = [(_run_heads(case, ours), case.separate(theirs)), (ours.key, theirs.key), (ours.value, theirs.value)]
    faults = [unlike(mine, other, ON_DEVICE) for mine, other in pairs]
    if not bool(ours.key.isfinite().all() & ours.value.isfinite().all()):
        faults.append("the cache is not finite")
    before = ours.key.clone(), ours.value.clone()
    case.batch.slot_mapping.fill_(-1)
    _run_heads(case, ours)
    if not (torch.equal(ours.key, before[0]) and torch.equal(ours.value, before[1])):
        faults.append("a negative slot was written")
    return next(filter(None, faults), None)


def _run_heads(case: HeadsCase, cache: object) -> Tensor:
    kernel = TritonHeads(case.problem)
    return kernel.forward(case.projected, case.rotation, case.layer.qk_norm, cache, case.batch)  # type: ignore[arg-type]


def _gate_units(*, dry: bool) -> Iterator[Unit]:
    size = 100 if dry else 2500
    for dtype in DTYPES:
        for activation in get_args(Activation):
            yield partial(_gates, LinearProblem("", dtype, 8, 2 * size, False, activation))


def _gates(problem: LinearProblem, device: torch.device) -> Checks:
    dtype, activation = problem.dtype, problem.gate
    assert activation is not None
    halves = _drawn((3, problem.outputs), dtype, device)
    ours, theirs = TritonGate(replace(problem, device=device.type))(halves), gated(halves, activation)
    if activation.startswith("gelu"):
        close = torch.allclose(ours, theirs, rtol=2 * torch.finfo(dtype).eps, atol=NOISE)
        fault = None if close else f"largest difference {(ours.float() - theirs.float()).abs().max():.1e}"
    else:
        fault = unlike(ours, theirs, ON_DEVICE)
    yield f"{activation}(gate) * up in {str(dtype).removeprefix('torch.')}", fault


def _drawn(size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return (torch.randn(size, generator=torch.Generator().manual_seed(size[0])) * 3).to(dtype).to(device)


@torch.inference_mode()
def layer_speed(report: Report, shard: int, shards: int) -> None:
    """A launch within a graph, in the order of a decode step, against the bytes that must move."""
    bandwidth = copy_bandwidth(report)
    for rows in (2,) if report.dry else ROWS:
        for name, (ours, theirs, moved) in _parts(rows, report.device).items():
            mine, other = (graph_ms(work, report.device, count=2 if report.dry else 50) for work in (ours, theirs))
            share = moved / mine * 1e3 / bandwidth
            text = f"{mine * 1e3:.2f} us for {moved / 1e6:.2f} MB, {share:.0%} of the copy's rate"
            report.note(f"{name}, {rows} rows", f"{text}; torch {other * 1e3:.2f} us")


def _parts(rows: int, device: torch.device) -> dict[str, tuple[Callable[[], object], Callable[[], object], int]]:
    """By name: the kernel, the same in torch, and the bytes read and written at least."""
    norm = NormProblem(device.type, BF16, HIDDEN, False, 1e-5)
    ours, theirs = TritonNorm(norm), TorchNorm(norm)
    x, added, weight = (_drawn((count, HIDDEN), BF16, device) for count in (rows, rows, 1))
    gate = TritonGate(LinearProblem(device.type, BF16, HIDDEN, 2 * WIDTH, False, "silu"))
    halves = _drawn((rows, 2 * WIDTH), BF16, device)
    case = build_heads(HEADS, rows, device, seed=0)
    kernel, cache = TritonHeads(case.problem), case.cache()
    return {
        "sum and norm": (
            lambda: ours.forward(x, weight[0], added),
            lambda: theirs.forward(x.add_(added), weight[0]),
            4 * x.nbytes,
        ),
        "heads": (
            lambda: kernel.forward(case.projected, case.rotation, None, cache, case.batch),
            lambda: case.separate(cache),
            2 * rows * 48 * 128 * 2,
        ),
        "gate": (lambda: gate(halves), lambda: gated(halves, "silu"), halves.nbytes * 3 // 2),
    }
