"""Compiles the Triton kernels for a GPU that need not be there: `python -m tests.gpu.compile CAPABILITY SHAPES`.

The launches are those of the product: its kernels run on CPU tensors with the launch replaced by a compilation. Each
prints a line with what a program of it takes; the status is 1 when one does not fit the GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model_executor.attention.triton_paged import Device, TritonPaged
from model_executor.kernels import decode, gated, heads, norm, prefill
from model_executor.layers.linear import LinearProblem
from model_executor.layers.norm import NormProblem
from model_executor.layers.triton_gated import TritonGate
from model_executor.layers.triton_heads import TritonHeads
from model_executor.layers.triton_norm import TritonNorm
from model_executor.models.spec import NormSpec
from tests.gpu.cases import Shape, build
from tests.gpu.layer_cases import HeadsShape, build_heads

WARP: Final = 32
# What a program may take of shared memory, by compute capability.
SHARED_MEMORY: Final = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
TYPES: Final = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64"}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MIXED: Final = ((1000, 1), (0, 40))
KERNELS: Final = (
    (decode, ("decode_kernel", "join_kernel")),
    (prefill, ("prefill_kernel",)),
    (norm, ("norm_kernel",)),
    (heads, ("heads_kernel",)),
    (gated, ("gated_kernel",)),
)

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
}


@dataclass(frozen=True)
class Compiler:
    """Stands in for a kernel: a launch becomes a compilation.

    Attributes:
        kernel: the kernel.
        capability: of the GPU, such as 90.
        check: takes the kernel's name and what came out.
    """

    kernel: Any
    capability: int
    check: Callable[[str, Any], None]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert 1 <= len(grid) <= 3
        return self._compile

    def _compile(self, *args: object, **options: Any) -> None:
        names = self.kernel.arg_names
        bound = dict(zip(names, args, strict=False)) | {name: options.pop(name) for name in names if name in options}
        assert set(bound) == set(names), set(names) ^ set(bound)
        params = {param.name: param for param in self.kernel.params}
        constants = {name for name, param in params.items() if param.is_constexpr or _is_one(param, bound[name])}
        signature = {name: "constexpr" if name in constants else _type(bound[name]) for name in names}
        places = {name: (index,) for index, name in enumerate(names)}
        known = [name for name in names if name not in constants and _divides(params[name], bound[name])]
        source = ASTSource(
            fn=self.kernel,
            signature=signature,
            constexprs={places[name]: bound[name] for name in constants},
            attrs={places[name]: [["tt.divisibility", 16]] for name in known},
        )
        made = triton.compile(source, target=GPUTarget("cuda", self.capability, WARP), options=options)
        self.check(self.kernel.fn.__name__, made)


def _type(value: object) -> str:
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    assert isinstance(value, int | float)
    return "fp32" if isinstance(value, float) else "i32"


# What a launch specializes on: integers that are 1, and addresses and integers that divide by 16.
def _is_one(param: Any, value: object) -> bool:
    return isinstance(value, int) and value == 1 and not param.do_not_specialize


def _divides(param: Any, value: object) -> bool:
    if param.do_not_specialize or param.do_not_specialize_on_alignment:
        return False
    return isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)


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

    def check(name: str, made: Any) -> None:
        nonlocal wrong
        shared, (registers, stack) = made.metadata.shared, resources(made.asm["cubin"])
        bad = shared > SHARED_MEMORY[capability]
        wrong += bad
        line = f"{'BAD' if bad else 'ok'} {name}: {title}: {WARP * made.metadata.num_warps} threads"
        print(f"{line}, {shared} bytes of shared memory, {registers} registers, {stack} of stack", flush=True)  # noqa: T201

    for module, names in KERNELS:
        for name in names:
            setattr(module, name, Compiler(getattr(module, name), capability, check))
    device = Device(processors=132, shared_memory=SHARED_MEMORY[capability])
    for shape in SHAPES[shapes]:
        title = str(shape)
        case = build(shape, torch.device("cpu"), seed=0)
        TritonPaged(replace(case.problem, device="cuda"), device).forward(case.query, case.cache, case.batch)
    for norm_problem in NORMS[shapes]:
        title = str(norm_problem)
        _norm(norm_problem)
    for heads_shape in HEADS[shapes]:
        title = str(heads_shape)
        _heads(heads_shape)
    for gate_problem in GATES[shapes]:
        title = str(gate_problem)
        TritonGate(gate_problem)(torch.zeros(2, gate_problem.outputs, dtype=gate_problem.dtype))
    return wrong


def _norm(problem: NormProblem) -> None:
    rows = torch.zeros(2, problem.size, dtype=problem.dtype)
    kernel = TritonNorm(problem)
    kernel.forward(rows, rows[0])
    kernel.forward(rows, rows[0], rows)


def _heads(shape: HeadsShape) -> None:
    case = build_heads(shape, 4, torch.device("cpu"), seed=0)
    kernel = TritonHeads(case.problem)
    kernel.forward(case.projected, case.rotation, case.layer.qk_norm, case.cache(), case.batch)


if __name__ == "__main__":
    sys.exit(min(main(int(sys.argv[1]), sys.argv[2]), 1))
