"""The parameters of a model, and the checkpoint tensors each is made from: by name and shape, before any file is read.

A parameter's name holds the runtime index ("blocks.1.mlp.down.weight"), its sources' names the source index
("model.layers.7.mlp.down_proj.weight"). Shapes follow from the spec, names from the family's table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from model_executor.models.spec import AttentionSpec, Dtype, LayerSpec, MlpSpec, ModelSpec, NormSpec
from model_executor.weights.layer_plan import LayerPlan

Fill: TypeAlias = Literal["noise", "ones", "zeros"]

EMBEDDING: Final = "embedding.weight"
HEAD: Final = "head.weight"


class Source(Struct, frozen=True):
    """A tensor as the checkpoint must hold it."""

    name: str
    shape: tuple[int, ...]


class Parameter(Struct, frozen=True):
    """A parameter of the model.

    Attributes:
        name: in the model.
        shape: in the model.
        sources: laid one after the other along their first axis (the output axis of a linear map).
        transposed: the result, (out, in), is stored as (in, out).
        fill: what dummy weights are: noise, or what makes the scale of a norm one.
        dtype: whatever the model computes in; None: the model's.
        product: a kernel of operator "linear" computes with it, and may keep it in a form of its own.

    The sources of a parameter of three axes, (experts, in, out), are those of one expert after the other.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    transposed: bool = False
    fill: Fill = "noise"
    dtype: Dtype | None = None
    product: bool = False


class IgnoreRule(Struct, frozen=True):
    """Tensors that are left in the file.

    Attributes:
        pattern: regular expression for the whole name.
        reason: why nothing is lost.
        other_part: they make up a part of the model that does not run here, so a cut takes them along.
    """

    pattern: str
    reason: str
    other_part: bool = False


class NameTable(Struct, frozen=True):
    """What a family's checkpoints call the parameters.

    Attributes:
        embedding, norm, head: tensors outside the blocks.
        block: prefix of a block's tensors, with {source}.
        parts: for each part of a block the modules in the checkpoint that make it, in order.
        ignored: rules for tensors that no parameter needs.
        others: tables of the same family's checkpoints that were saved under other names.
    """

    embedding: str
    norm: str
    head: str
    block: str
    parts: Mapping[str, tuple[str, ...]]
    ignored: tuple[IgnoreRule, ...]
    others: tuple[NameTable, ...] = ()

    def of(self, tensors: Collection[str]) -> NameTable:
        """The table by which a checkpoint with these tensors was named; this one, if none fits."""
        return next((table for table in (self, *self.others) if table.norm in tensors), self)

    def rule_of(self, tensor: str) -> IgnoreRule | None:
        """The rule by which a tensor is left in the file; None: there is none."""
        return next((rule for rule in self.ignored if re.fullmatch(rule.pattern, tensor)), None)


class Linear(Struct, frozen=True):
    """A linear map of a block: widths of its outputs, one for each module it is made from; see Parameter."""

    part: str
    inputs: int
    outputs: tuple[int, ...]
    bias: bool
    dtype: Dtype | None = None
    product: bool = True


class Norm(Struct, frozen=True):
    """A norm of a block: sizes of its scale, one for each module it is made from."""

    part: str
    sizes: tuple[int, ...]
    spec: NormSpec

    @property
    def fill(self) -> Fill:
        """What makes its scale one."""
        return _scale_one(self.spec)


class Experts(Struct, frozen=True):
    """A linear map of each expert. The names of its modules hold the expert's number as {expert}."""

    part: str
    num_experts: int
    inputs: int
    outputs: tuple[int, ...]


class Vector(Struct, frozen=True):
    """A float32 vector. Its name in the checkpoint stands in the table in full."""

    part: str
    size: int


Part: TypeAlias = Linear | Norm | Experts | Vector


def plan_parameters(spec: ModelSpec, plan: LayerPlan, names: NameTable) -> tuple[Parameter, ...]:
    """All that a plan runs: what stands outside the blocks, then its blocks."""
    return (*outer_parameters(spec, names), *block_parameters(spec, plan, names))


def outer_parameters(spec: ModelSpec, names: NameTable) -> tuple[Parameter, ...]:
    """Embedding, final norm and head. A tied head is no parameter."""
    table = (spec.vocab_size, spec.hidden_size)
    embedding = Parameter(EMBEDDING, table, (Source(names.embedding, table),))
    size = (spec.hidden_size,)
    norm = Parameter("norm.weight", size, (Source(names.norm, size),), fill=_scale_one(spec.norm))
    return (embedding, norm) if spec.tie else (embedding, norm, head_parameter(spec, names))


def head_parameter(spec: ModelSpec, names: NameTable) -> Parameter:
    """A head of its own."""
    table = (spec.vocab_size, spec.hidden_size)
    return Parameter(HEAD, table[::-1], (Source(names.head, table),), transposed=True, product=True)


def block_parameters(spec: ModelSpec, plan: LayerPlan, names: NameTable) -> Iterator[Parameter]:
    """The parameters of the plan's blocks, in runtime order."""
    for runtime, layer in enumerate(plan.layers(spec)):
        own, theirs = f"blocks.{runtime}.", names.block.format(source=layer.source)
        for part in _parts(layer, spec.hidden_size):
            yield from _part_parameters(part, own, theirs, names.parts[part.part])


def _parts(layer: LayerSpec, hidden: int) -> tuple[Part, ...]:
    around = ["attention_norm", "mlp_norm"]
    if layer.sandwich:
        around += ["attention_out_norm", "mlp_out_norm"]
    return (
        *(Norm(part, (hidden,), layer.norm) for part in around),
        *_ATTENTION[layer.attention.kind](layer.attention, hidden),
        *_MLP[layer.mlp.kind](layer.mlp, hidden),
    )


def _grouped(spec: AttentionSpec, hidden: int) -> tuple[Part, ...]:
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    maps = (
        Linear("attention.qkv", hidden, (queries, keys, keys), spec.qkv_bias),
        Linear("attention.output", queries, (hidden,), spec.output_bias),
    )
    if spec.qk_norm is None:
        return maps
    return (*maps, Norm("attention.qk_norm", (spec.head_dim, spec.head_dim), spec.qk_norm))


def _gated(spec: MlpSpec, hidden: int) -> tuple[Part, ...]:
    width = spec.intermediate_size
    return (
        Linear("mlp.gate_up", hidden, (width, width), spec.bias),
        Linear("mlp.down", width, (hidden,), spec.bias),
    )


def _latent(spec: AttentionSpec, hidden: int) -> tuple[Part, ...]:
    latent = spec.latent
    assert latent is not None
    queries, made = spec.num_heads * spec.head_dim, spec.num_heads * (latent.nope_dim + latent.value_dim)
    rank, bias = latent.query_rank, spec.qkv_bias
    made_queries: tuple[Part, ...] = (Linear("attention.query.full", hidden, (queries,), bias=False),)
    if rank is not None:
        made_queries = (
            Linear("attention.query.down", hidden, (rank,), bias),
            Norm("attention.query.norm", (rank,), latent.norm),
            Linear("attention.query.up", rank, (queries,), bias=False),
        )
    return (
        *made_queries,
        Linear("attention.down", hidden, (latent.width,), bias),
        Norm("attention.norm", (latent.kv_rank,), latent.norm),
        # The kernel of the attention takes it as it is.
        Linear("attention.up", latent.kv_rank, (made,), bias=False, product=False),
        Linear("attention.output", spec.num_heads * latent.value_dim, (hidden,), spec.output_bias),
    )


def _experts(spec: MlpSpec, hidden: int) -> tuple[Part, ...]:
    assert spec.moe is not None
    routing, width, shared = spec.moe.routing, spec.intermediate_size, spec.moe.shared_size
    parts: list[Part] = [
        Linear(
            "mlp.router.scores",
            hidden,
            (routing.num_experts,),
            bias=False,
            dtype="float32" if routing.wide else None,
            product=False,
        )
    ]
    if routing.correction:
        parts.append(Vector("mlp.router.correction", routing.num_experts))
    parts.append(Experts("mlp.experts.gate_up", routing.num_experts, hidden, (width, width)))
    parts.append(Experts("mlp.experts.down", routing.num_experts, width, (hidden,)))
    if shared:
        parts.append(Linear("mlp.shared.gate_up", hidden, (shared, shared), spec.bias))
        parts.append(Linear("mlp.shared.down", shared, (hidden,), spec.bias))
    return tuple(parts)


_ATTENTION: Final[Mapping[str, Callable[[AttentionSpec, int], tuple[Part, ...]]]] = {
    "grouped": _grouped,
    "mla": _latent,
}
_MLP: Final[Mapping[str, Callable[[MlpSpec, int], tuple[Part, ...]]]] = {"gated": _gated, "moe": _experts}


def _part_parameters(part: Part, own: str, theirs: str, modules: tuple[str, ...]) -> Iterator[Parameter]:
    if isinstance(part, Linear):
        yield from _linear_parameters(part, own, theirs, modules)
        return
    if isinstance(part, Experts):
        yield _experts_parameter(part, own, theirs, modules)
        return
    if isinstance(part, Vector):
        (name,) = modules
        yield Parameter(f"{own}{part.part}", (part.size,), (Source(theirs + name, (part.size,)),), dtype="float32")
        return
    made = zip(modules, part.sizes, strict=True)
    sources = tuple(Source(f"{theirs}{module}.weight", (size,)) for module, size in made)
    yield Parameter(f"{own}{part.part}.weight", (sum(part.sizes),), sources, fill=part.fill)


def _linear_parameters(linear: Linear, own: str, theirs: str, modules: tuple[str, ...]) -> Iterator[Parameter]:
    made = tuple(zip(modules, linear.outputs, strict=True))
    width = sum(linear.outputs)
    weights = tuple(Source(f"{theirs}{module}.weight", (out, linear.inputs)) for module, out in made)
    shape, dtype, product = (linear.inputs, width), linear.dtype, linear.product
    yield Parameter(f"{own}{linear.part}.weight", shape, weights, transposed=True, dtype=dtype, product=product)
    if linear.bias:
        biases = tuple(Source(f"{theirs}{module}.bias", (out,)) for module, out in made)
        yield Parameter(f"{own}{linear.part}.bias", (width,), biases, product=product)


def _experts_parameter(part: Experts, own: str, theirs: str, modules: tuple[str, ...]) -> Parameter:
    made = tuple(zip(modules, part.outputs, strict=True))
    sources = tuple(
        Source(f"{theirs}{module.format(expert=expert)}.weight", (out, part.inputs))
        for expert in range(part.num_experts)
        for module, out in made
    )
    shape = (part.num_experts, part.inputs, sum(part.outputs))
    return Parameter(f"{own}{part.part}", shape, sources, transposed=True)


def _scale_one(norm: NormSpec) -> Fill:
    return "zeros" if norm.offset else "ones"
