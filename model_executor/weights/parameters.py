"""The parameters of a model, and the checkpoint tensors each is made from: by name and shape, before any file is read.

A parameter's name holds the runtime index ("blocks.1.mlp.down.weight"), its sources' names the source index
("model.layers.7.mlp.down_proj.weight"). Shapes follow from the spec, names from the family's table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal

from msgspec import Struct

from model_executor.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from model_executor.weights.layer_plan import LayerPlan

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
        fill: what dummy weights are: noise, or ones for the scale of a norm.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    transposed: bool = False
    fill: Literal["noise", "ones"] = "noise"


class IgnoreRule(Struct, frozen=True):
    """Tensors that are left in the file.

    Attributes:
        pattern: regular expression for the whole name.
        reason: why nothing is lost.
    """

    pattern: str
    reason: str


class NameTable(Struct, frozen=True):
    """What a family's checkpoints call the parameters.

    Attributes:
        embedding, norm, head: tensors outside the blocks.
        block: prefix of a block's tensors, with {source}.
        parts: for each part of a block the modules in the checkpoint that make it, in order.
        ignored: rules for tensors that no parameter needs.
    """

    embedding: str
    norm: str
    head: str
    block: str
    parts: Mapping[str, tuple[str, ...]]
    ignored: tuple[IgnoreRule, ...]


class Linear(Struct, frozen=True):
    """A linear map of a block: widths of its outputs, one for each module it is made from."""

    part: str
    inputs: int
    outputs: tuple[int, ...]
    bias: bool


def outer_parameters(spec: ModelSpec, names: NameTable) -> tuple[Parameter, ...]:
    """Embedding, final norm and head. A tied head is no parameter."""
    table = (spec.vocab_size, spec.hidden_size)
    embedding = Parameter(EMBEDDING, table, (Source(names.embedding, table),))
    norm = Parameter("norm.weight", (spec.hidden_size,), (Source(names.norm, (spec.hidden_size,)),), fill="ones")
    return (embedding, norm) if spec.tie else (embedding, norm, head_parameter(spec, names))


def head_parameter(spec: ModelSpec, names: NameTable) -> Parameter:
    """A head of its own."""
    table = (spec.vocab_size, spec.hidden_size)
    return Parameter(HEAD, table[::-1], (Source(names.head, table),), transposed=True)


def block_parameters(spec: ModelSpec, plan: LayerPlan, names: NameTable) -> Iterator[Parameter]:
    """The parameters of the plan's blocks, in runtime order."""
    for runtime, layer in enumerate(plan.layers(spec)):
        own, theirs = f"blocks.{runtime}.", names.block.format(source=layer.source)
        for part in ("attention_norm", "mlp_norm"):
            (module,) = names.parts[part]
            source = Source(f"{theirs}{module}.weight", (spec.hidden_size,))
            yield Parameter(f"{own}{part}.weight", source.shape, (source,), fill="ones")
        for linear in _linears(layer, spec.hidden_size):
            yield from _linear_parameters(linear, own, theirs, names.parts[linear.part])


def _linears(layer: LayerSpec, hidden: int) -> tuple[Linear, ...]:
    return _ATTENTION[layer.attention.kind](layer.attention, hidden) + _MLP[layer.mlp.kind](layer.mlp, hidden)


def _grouped(spec: AttentionSpec, hidden: int) -> tuple[Linear, ...]:
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return (
        Linear("attention.qkv", hidden, (queries, keys, keys), spec.qkv_bias),
        Linear("attention.output", queries, (hidden,), spec.output_bias),
    )


def _gated(spec: MlpSpec, hidden: int) -> tuple[Linear, ...]:
    width = spec.intermediate_size
    return (
        Linear("mlp.gate_up", hidden, (width, width), spec.bias),
        Linear("mlp.down", width, (hidden,), spec.bias),
    )


_ATTENTION: Final[Mapping[str, Callable[[AttentionSpec, int], tuple[Linear, ...]]]] = {"grouped": _grouped}
_MLP: Final[Mapping[str, Callable[[MlpSpec, int], tuple[Linear, ...]]]] = {"gated": _gated}


def _linear_parameters(linear: Linear, own: str, theirs: str, modules: tuple[str, ...]) -> Iterator[Parameter]:
    made = tuple(zip(modules, linear.outputs, strict=True))
    width = sum(linear.outputs)
    weights = tuple(Source(f"{theirs}{module}.weight", (out, linear.inputs)) for module, out in made)
    yield Parameter(f"{own}{linear.part}.weight", (linear.inputs, width), weights, transposed=True)
    if linear.bias:
        biases = tuple(Source(f"{theirs}{module}.bias", (out,)) for module, out in made)
        yield Parameter(f"{own}{linear.part}.bias", (width,), biases)
