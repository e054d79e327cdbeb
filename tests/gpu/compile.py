"""Compiles the Triton kernels for a GPU that need not be there: `python -m tests.gpu.compile CAPABILITY SHAPES`.

The launches are those of the product, on CPU tensors, through all of Triton's own path from the call to the loading of
the program; only what stands for the driver of the GPU does nothing. Each program prints a line with what it takes; the
status is 1 when one does not fit the GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from model_executor.attention.triton_paged import Device, TritonPaged
from model_executor.layers.linear import LinearProblem
from model_executor.layers.norm import NormProblem
from model_executor.layers.triton_gated import TritonGate
from model_executor.layers.triton_heads import TritonHeads
from model_executor.layers.triton_norm import TritonNorm
from model_executor.models.spec import Activation, NormSpec
from tests.gpu.cases import SHAPES as SMALL_SHAPES
from tests.gpu.cases import Shape, build
from tests.gpu.kernels import LARGE
from tests.gpu.layer_cases import HEADS_SHAPES, HeadsShape, build_heads
from tests.gpu.layers import SIZES

WARP: Final = 32
# What a program may take of shared memory, by compute capability.
SHARED_MEMORY: Final = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MIXED: Final = ((1000, 1), (0, 40))
DECODED: Final = tuple(tuple((50, 1) for _ in range(rows)) for rows in (8, 16, 32, 64, 128))


def _checked() -> tuple[Shape, ...]:
    """What scripts/gpu_check compiles, and the other splits of decode for more rows."""
    drawn = [*LARGE, *SMALL_SHAPES, *(replace(shape, dtype=dtype) for shape in SMALL_SHAPES for dtype in (F32, BF16))]
    splits = [Shape(rows, 32, 8, 128, dtype=BF16) for rows in DECODED]
    return tuple(dict.fromkeys([*(replace(shape, rows=MIXED) for shape in drawn), *splits]))


SHAPES: Final[dict[str, tuple[Shape, ...]]] = {
    "few": (Shape(MIXED, 32, 8, 128, dtype=BF16),),
    "all": (
        Shape(MIXED, 32, 8, 128, dtype=BF16),
        Shape(MIXED, 9, 3, 64, dtype=BF16),
        Shape(MIXED, 16, 8, 256, window=1024, soft_cap=50.0, dtype=BF16),
        Shape(MIXED, 32, 8, 128, window=4096, dtype=F16),
        Shape(MIXED, 32, 32, 96, dtype=F16),
        Shape(MIXED, 32, 32, 80, block_size=128, dtype=BF16),
        Shape(MIXED, 64, 1, 128, dtype=BF16),
        Shape(MIXED, 9, 3, 64),
        Shape(MIXED, 32, 8, 128),
        Shape(MIXED, 16, 8, 256),
    ),
    "check": _checked(),
}
NORMS: Final[dict[str, tuple[NormProblem, ...]]] = {
    "few": (NormProblem("cuda", BF16, 4096, False, 1e-5),),
    "all": (
        NormProblem("cuda", BF16, 4096, False, 1e-5),
        NormProblem("cuda", F32, 576, False, 1e-5),
        NormProblem("cuda", BF16, 5376, True, 1e-6),
        NormProblem("cuda", F16, 512, False, 1e-6),
        NormProblem("cuda", F32, 16384, True, 1e-6),
    ),
    "check": tuple(
        NormProblem("cuda", dtype, size, offset, 1e-6)
        for dtype, sizes in SIZES.items()
        for size in sizes
        for offset in (False, True)
    ),
}
HEADS: Final[dict[str, tuple[HeadsShape, ...]]] = {
    "few": (HeadsShape(32, 8, 128, BF16, rotary=128),),
    "all": (
        HeadsShape(32, 8, 128, BF16, rotary=128),
        HeadsShape(9, 3, 64, F32, rotary=64),
        HeadsShape(16, 8, 256, BF16, rotary=256, norm=NormSpec(1e-6, offset=True)),
        HeadsShape(32, 4, 128, BF16, rotary=128, norm=NormSpec(1e-6), kept=F16),
        HeadsShape(32, 32, 80, F16, rotary=32),
    ),
    "check": HEADS_SHAPES,
}
GATES: Final[dict[str, tuple[LinearProblem, ...]]] = {
    "few": (LinearProblem("cuda", BF16, 4096, 28672, False, "silu"),),
    "all": (
        LinearProblem("cuda", BF16, 4096, 28672, False, "silu"),
        LinearProblem("cuda", F32, 576, 3072, False, "silu"),
        LinearProblem("cuda", BF16, 5376, 43008, False, "gelu_tanh"),
        LinearProblem("cuda", F16, 64, 200, False, "gelu"),
        LinearProblem("cuda", BF16, 64, 200, False, "relu"),
    ),
    "check": tuple(
        LinearProblem("cuda", dtype, 8, 5000, False, gate) for dtype in SIZES for gate in get_args(Activation)
    ),
}


class NoDriver:
    """Stands for the driver of a GPU: launches go nowhere.

    Args:
        capability: of the GPU, such as 90.
        loaded: takes the name of each program, its bytes of shared memory, its threads and its binary.
    """

    def __init__(self, capability: int, loaded: Callable[[str, int, int, bytes], None]) -> None:
        self.utils = self
        self._target = GPUTarget("cuda", capability, WARP)
        self._loaded = loaded
        self._warps = 0

    def get_current_target(self) -> GPUTarget:
        """As Triton asks for it."""
        return self._target

    def get_current_device(self) -> int:
        """The first."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return device

    def get_device_properties(self, device: int) -> dict[str, int]:
        """No limit: what a program takes is told whether it fits or not."""
        del device
        return {"max_shared_mem": sys.maxsize}

    def launcher_cls(self, source: object, metadata: Any) -> Callable[..., None]:
        """What is called for a launch."""
        del source
        self._warps = metadata.num_warps
        return lambda *_: None

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills and most threads."""
        del device
        self._loaded(name, shared, WARP * self._warps, cubin)
        return 1, 1, 0, 0, 1024


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack: what registers could not hold."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True)
    registers, stack = (max(map(int, re.findall(rf"{name}:(\d+)", text.stdout))) for name in ("REG", "STACK"))
    return registers, stack


def main(capability: int, shapes: str) -> int:
    """Compile everything; the number of kernels that do not fit."""
    wrong = 0
    title = ""

    def loaded(name: str, shared: int, threads: int, cubin: bytes) -> None:
        nonlocal wrong
        registers, stack = resources(cubin)
        bad = shared > SHARED_MEMORY[capability]
        wrong += bad
        line = f"{'BAD' if bad else 'ok'} {name}: {title}: {threads} threads"
        print(f"{line}, {shared} bytes of shared memory, {registers} registers, {stack} of stack", flush=True)  # noqa: T201

    driver.set_active(NoDriver(capability, loaded))
    for about, launch in _launches(shapes, Device(processors=132, shared_memory=SHARED_MEMORY[capability])):
        title = about
        launch()
    return wrong


def _launches(shapes: str, device: Device) -> Iterator[tuple[str, Callable[[], object]]]:
    """All launches of a set, with what they are about."""
    for shape in SHAPES[shapes]:
        yield str(shape), partial(_attention, shape, device)
    for norm in NORMS[shapes]:
        yield str(norm), partial(_norm, norm)
    for heads in HEADS[shapes]:
        yield str(heads), partial(_heads, heads)
    for gate in GATES[shapes]:
        yield str(gate), partial(_gate, gate)


def _attention(shape: Shape, device: Device) -> None:
    case = build(shape, torch.device("cpu"), seed=0)
    TritonPaged(replace(case.problem, device="cuda"), device).forward(case.query, case.cache, case.batch)


def _norm(problem: NormProblem) -> None:
    rows = torch.zeros(2, problem.size, dtype=problem.dtype)
    kernel = TritonNorm(problem)
    kernel.forward(rows, rows[0])
    kernel.forward(rows, rows[0], rows)


def _heads(shape: HeadsShape) -> None:
    case = build_heads(shape, 4, torch.device("cpu"), seed=0)
    kernel = TritonHeads(case.problem)
    kernel.forward(case.projected, case.rotation, case.layer.qk_norm, case.cache(), case.batch)


def _gate(problem: LinearProblem) -> None:
    TritonGate(problem)(torch.zeros(2, problem.outputs, dtype=problem.dtype))


if __name__ == "__main__":
    sys.exit(min(main(int(sys.argv[1]), sys.argv[2]), 1))
