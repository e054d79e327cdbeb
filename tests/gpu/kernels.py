"""Attention against its oracle, on the device."""

from __future__ import annotations

from dataclasses import replace

import torch

from model_executor.attention.triton_paged import TritonPaged
from tests.gpu.cases import SHAPES, TOLERANCE, Shape, build, relative_error
from tests.gpu.report import Report

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DECODE_64 = tuple((937 + 13 * row, 1) for row in range(64))
LARGE = (
    Shape(DECODE_64, 32, 8, 128, dtype=BF16),
    Shape(((8191, 1),), 32, 8, 128, dtype=BF16),
    Shape(((20000, 1), (5, 1), (0, 1)), 32, 8, 128, dtype=F16),
    Shape(tuple((row, 1) for row in range(200)), 8, 8, 64, dtype=BF16),
    Shape(((0, 2048),), 32, 8, 128, dtype=BF16),
    Shape(((0, 1000), (3000, 500), (100, 1), (7000, 1), (0, 17)), 32, 8, 128, dtype=BF16),
    Shape(((0, 1500), (4000, 600), (5000, 1)), 16, 8, 256, window=1024, soft_cap=50.0, dtype=BF16),
    Shape(((0, 1500), (4000, 600), (5000, 1)), 32, 8, 128, window=4096, dtype=F16),
    Shape(((0, 700), (1000, 300), (2000, 1)), 9, 3, 64, block_size=128),
    Shape(((0, 700), (1000, 300), (2000, 1)), 16, 8, 128),
    Shape(((0, 700), (1000, 300), (2000, 1)), 64, 1, 128, dtype=BF16),
    Shape(((0, 700), (1000, 300), (2000, 1)), 28, 4, 128, dtype=BF16),
)


def attention(report: Report, shard: int, shards: int) -> None:
    """Every shape in float32 and bfloat16, some in float16, against the oracle in float32; twice, since an answer that
    moves is a race.
    """
    wide = [replace(shape, dtype=dtype) for shape in SHAPES for dtype in (F32, BF16)]
    narrow = [shape for shape in SHAPES if shape.dtype == F16]
    shapes = [*wide[14:15], *narrow[:1]] if report.dry else [*LARGE, *wide, *narrow]
    for seed, shape in list(enumerate(shapes))[shard::shards]:
        case = build(shape, report.device, seed)
        kernel = TritonPaged(case.problem)
        first, second = (kernel.forward(case.query, case.cache, case.batch) for _ in range(2))
        error = relative_error(first, case.expected())
        same = torch.equal(first, second)
        passed = error < TOLERANCE[shape.dtype] and same
        report.check(str(shape), passed, f"error {error:.1e}{'' if same else ', and it moves'}")
