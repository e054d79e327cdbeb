"""Names for what a model runs, where torch's profiler can see them: a range for each block and each operator.

Marks are hooks and proxies that are put on a built model when a profile was asked for; without one they do not exist.
The names of operators are those of tools/operators.py. A kernel is marked where it runs: what it stands for is told by
the operator's range around it, or, where no module of the model does just that, by KERNEL_OPERATORS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, TypeVar, cast

from torch import Tensor, nn
from torch.profiler import record_function

from model_executor.attention.dispatch import Candidate, KernelTable
from model_executor.attention.mla import MlaProblem
from model_executor.layers.attention import GroupedAttention
from model_executor.layers.mla import LatentAttention
from model_executor.layers.mlp import GatedMlp
from model_executor.layers.moe import MoeMlp
from model_executor.layers.norm import RmsNorm
from model_executor.layers.rotary import Rotation
from model_executor.models.decoder import Block, Decoder
from model_executor.tools.operators import heads_operators
from model_executor.weights.layer_plan import LayerPlan

CLASS: Final = "tercet:class:"
OPERATOR: Final = "tercet:operator:"
KERNEL: Final = "tercet:kernel:"
LOGITS: Final = "tercet:logits"
SOFT_CAP: Final = f"{OPERATOR}soft cap of the logits"
SAMPLING: Final = "sampling"

# The registry's name of an operator, and the plan's. An operator that is not here runs within the range of another.
KERNEL_OPERATORS: Final = {
    "attention": ("attention",),
    "kv_append": ("kv_append",),
    "mla_attention": ("attention: latent",),
    "experts": ("experts: grouped linear, gated activation",),
}
LATENT_APPEND: Final = ("kv_append: latent",)

K = TypeVar("K")
P = TypeVar("P")


class MarkedKernel:
    """A kernel whose runs are marked.

    Args:
        kernel: that runs.
        name: of the kernel in the registry.
        operators: of the plan that it does, all at once; none: those in whose range it runs.

    Attributes:
        name: as given.
    """

    def __init__(self, kernel: object, name: str, operators: Sequence[str] = ()) -> None:
        self._kernel: Any = kernel
        self.name = name
        self._marks = [mark for each in operators for mark in (OPERATOR + each, KERNEL + name)] or [KERNEL + name]

    def standing_for(self, operators: Sequence[str]) -> MarkedKernel:
        """The same kernel as one that does these operators."""
        return MarkedKernel(self._kernel, self.name, operators)

    def forward(self, *inputs: object) -> Tensor | None:
        """What the kernel gives."""
        with ExitStack() as ranges:
            for mark in self._marks:
                ranges.enter_context(record_function(mark))
            return cast("Tensor | None", self._kernel.forward(*inputs))

    def __getattr__(self, name: str) -> object:
        return getattr(self._kernel, name)


class MarkedTable(KernelTable):
    """A kernel table that hands out marked kernels and chooses as every other does."""

    def _make(self, operator: str, problem: P, specs: Sequence[Candidate[P, K]]) -> K:
        kernel = super()._make(operator, problem, specs)
        if kernel is None:
            return kernel
        latent = operator == "kv_append" and isinstance(problem, MlaProblem)
        stands_for = LATENT_APPEND if latent else KERNEL_OPERATORS.get(operator, ())
        return cast("K", MarkedKernel(kernel, self._choices[-1].chosen, stands_for))


class MarkedRotation:
    """A rotation whose uses are marked.

    Args:
        rotation: that is applied.
        mark: name of the range.
    """

    def __init__(self, rotation: Rotation, mark: str) -> None:
        self._rotation = rotation
        self._mark = mark

    def apply(self, heads: Tensor) -> Tensor:
        """See Rotation."""
        with record_function(self._mark):
            return self._rotation.apply(heads)

    def __getattr__(self, name: str) -> object:
        return getattr(self._rotation, name)


def mark_model(model: Decoder, plan: LayerPlan) -> None:
    """Mark every operator of the model. Kernels that are called by name are marked by the MarkedTable they come from.

    Args:
        model: built for the plan.
        plan: its classes.
    """
    for module in model.modules():
        # Inside of the operator's range, which is laid around it below.
        if isinstance(kernel := getattr(module, "kernel", None), MarkedKernel):
            _hook(module, KERNEL + kernel.name)
    _mark(model.embedding, "embedding")
    _mark(model.norm, "rms_norm")
    _mark(model.head, "linear: head")
    _mark_logits(model)
    for block, layer_class in zip(model.blocks, plan.classes, strict=True):
        assert isinstance(block, Block)
        _hook(block, CLASS + layer_class)
        for module, operator in _operators(block):
            _mark(module, operator)
        _mark_rotation(block.attention)
        _mark_heads(block.attention)


def _operators(block: Block) -> Iterator[tuple[nn.Module, str]]:
    for name, module in block.named_children():
        if isinstance(module, RmsNorm):
            yield module, "rms_norm: after each part" if name.endswith("_out_norm") else "rms_norm"
    yield from _attention_operators(block.attention)
    yield from _mlp_operators(block.mlp)


def _attention_operators(attention: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    if isinstance(attention, GroupedAttention):
        yield attention.qkv, "linear: qkv"
        yield attention.output, "linear: output"
        if attention.qk_norm is not None:
            yield attention.qk_norm, "rms_norm: heads of queries and keys"
    if isinstance(attention, LatentAttention):
        yield attention.query, "linear: query and latent"
        yield attention.down, "linear: query and latent"
        yield attention.output, "linear: output"
        for module in attention.modules():
            if isinstance(module, RmsNorm):
                yield module, "rms_norm: latent"


def _mlp_operators(mlp: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    if isinstance(mlp, GatedMlp):
        yield mlp.gate_up, "linear: gate and up, gated"
        yield mlp.down, "linear: down"
    if isinstance(mlp, MoeMlp):
        yield mlp.router, "router"
        if mlp.shared is not None:
            yield mlp.shared, "shared experts"


def _mark(module: nn.Module, operator: str) -> None:
    _hook(module, OPERATOR + operator)


def _hook(module: nn.Module, name: str) -> None:
    """A range around each forward pass of the module."""
    open_ranges: list[record_function] = []

    def enter(*_: object) -> None:
        open_ranges.append(record_function(name))
        open_ranges[-1].__enter__()  # type: ignore[no-untyped-call]  # torch has no annotation for it

    def leave(*_: object) -> None:
        open_ranges.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave)


def _mark_rotation(attention: nn.Module) -> None:
    rope = attention.spec.rope  # type: ignore[union-attr]
    if rope is None:
        return
    mark = f"{OPERATOR}rotary: {rope.name}"  # type: ignore[union-attr]

    def proxy(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, rotation, *rest = inputs
        return hidden, MarkedRotation(rotation, mark), *rest

    attention.register_forward_pre_hook(proxy)


def _mark_heads(attention: nn.Module) -> None:
    """A kernel that does in one what else the layer does from the projection to the attention."""
    heads = getattr(getattr(attention, "kernels", None), "heads", None)
    if isinstance(attention, GroupedAttention) and isinstance(heads, MarkedKernel):
        marked: dict[str, Any] = {"heads": heads.standing_for(heads_operators(attention.spec))}
        attention.kernels = replace(attention.kernels, **marked)


def _mark_logits(model: Decoder) -> None:
    """The head is a module; what comes after it, the soft cap, is marked by marking all of `logits`."""
    plain = model.logits
    inner = LOGITS if model.final_soft_cap is None else SOFT_CAP

    def logits(hidden: Tensor) -> Tensor:
        with record_function(LOGITS), record_function(inner):
            return plain(hidden)

    object.__setattr__(model, "logits", logits)
