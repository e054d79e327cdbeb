"""A model as data, read from its config.json alone: no torch, no weights.

The indices here are *source* indices: layer s of a ModelSpec is block s of the checkpoint, with its own window, RoPE
and kind. Which of the layers run, and in which order, is the LayerPlan's business (weights/layer_plan.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct, structs

from engine_core.wire.config import ModelOptions
from model_executor.errors import ConfigRefused
from model_executor.models.config import ConfigFile
from model_executor.models.registry import find_family

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Dtype = Literal["float32", "bfloat16", "float16"]


class RopeSpec(Struct, frozen=True):
    """Rotary position embedding: what the angles of one position are.

    Attributes:
        kind: how the frequencies are scaled.
        theta: base of the frequencies.
        rotary_dim: leading elements of a head that are rotated; even, at most head_dim.
        reach: positions that this rotation is exact for: 0 .. reach - 1.
        factor: of the scaling (linear, dynamic, llama3, yarn).
        original_max_position: length the unscaled model was trained for (llama3, yarn).
        low_freq_factor, high_freq_factor: borders of the band that is interpolated (llama3).
        beta_fast, beta_slow: rotations at the borders of the ramp (yarn).
        truncate: whether the ramp's borders are rounded to whole dimensions (yarn).
        attention_factor: cos and sin are multiplied by it (yarn).
    """

    kind: RopeKind
    theta: float
    rotary_dim: int
    reach: int
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    truncate: bool = True
    attention_factor: float = 1.0


class AttentionSpec(Struct, frozen=True):
    """Attention of one block.

    Attributes:
        num_heads, num_kv_heads: query heads and key/value heads; the former is a multiple of the latter.
        head_dim: elements of a head.
        scale: scores are multiplied by it.
        rope: rotation of queries and keys; None: not rotated.
        window: a query at position p sees the keys at positions above p - window; None: all up to its own.
        soft_cap: scores become cap * tanh(score / cap); None: as they are.
        qkv_bias, output_bias: whether the projections have a bias.
        kind: which implementation; a key of the decoder's table.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    window: int | None = None
    soft_cap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    kind: str = "grouped"


class MlpSpec(Struct, frozen=True):
    """Feed-forward part of one block: down(activation(gate(x)) * up(x)).

    Attributes:
        intermediate_size: width of gate and up.
        activation: on the gate.
        bias: whether the three projections have one.
        kind: which implementation; a key of the decoder's table.
    """

    intermediate_size: int
    activation: Activation
    bias: bool = False
    kind: str = "gated"


class NormSpec(Struct, frozen=True):
    """Root-mean-square norm.

    Attributes:
        eps: added to the mean square.
    """

    eps: float


class LayerSpec(Struct, frozen=True):
    """One block of the checkpoint.

    Attributes:
        source: its index in the checkpoint.
        attention, mlp, norm: its parts.
    """

    source: int
    attention: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec

    @property
    def class_name(self) -> str:
        """Name of the block's class: blocks of one class differ in weights only."""
        reach = "full" if self.attention.window is None else f"sliding{self.attention.window}"
        return f"{self.attention.kind}-{reach}+{self.mlp.kind}"


class ModelSpec(Struct, frozen=True):
    """A decoder-only model.

    Attributes:
        architecture: as config.json names it.
        hidden_size: width of the residual stream.
        vocab_size: rows of embedding and head.
        max_model_len: tokens of prompt and output together, as asked for or as the model was made for.
        tie: whether the head is the embedding; a checkpoint that holds a head of its own all the same
            overrules it when the two differ.
        norm: the final norm.
        dtype: of the checkpoint as config.json says; None: it does not say.
        layers: every block of the checkpoint, layers[s].source == s.
        mtp_layers: blocks that follow the last one in the checkpoint and predict further tokens; they do not run.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    max_model_len: int
    tie: bool
    norm: NormSpec
    dtype: Dtype | None
    layers: tuple[LayerSpec, ...]
    mtp_layers: int = 0


def read_spec(model_dir: Path, options: ModelOptions) -> ModelSpec:
    """Read config.json of a model folder.

    Args:
        model_dir: the folder.
        options: `max_model_len` is honoured here; the rest is for others.

    Raises:
        CheckpointBroken: no folder, no config.json, or no JSON object in it.
        UnknownArchitecture: a family that cannot be served.
        ConfigRefused: a field, or max_model_len, that cannot be honoured exactly.
    """
    config = ConfigFile.read(model_dir / "config.json")
    spec = find_family(config).read(config)
    return spec if options.max_model_len is None else _limited(spec, options.max_model_len)


def resolve_dtype(requested: str, spec: ModelSpec, device: str, weights: Dtype | None = None) -> Dtype:
    """The dtype to compute in.

    Args:
        requested: of the options; "auto": float32 on CPU, elsewhere the checkpoint's.
        spec: of the model.
        device: "cpu" or "cuda".
        weights: dtype of the checkpoint's tensors, for a config.json that does not tell.
    """
    for dtype in ("float32", "bfloat16", "float16"):
        if requested == dtype:
            return dtype
    if device == "cpu":
        return "float32"
    return spec.dtype or weights or "float32"


def _limited(spec: ModelSpec, wanted: int) -> ModelSpec:
    if wanted > spec.max_model_len:
        kinds = {layer.attention.rope.kind for layer in spec.layers if layer.attention.rope is not None}
        why = f"at most {spec.max_model_len} with this model's max_position_embeddings and RoPE ({', '.join(kinds)})"
        raise ConfigRefused("max_model_len", wanted, why)
    return structs.replace(spec, max_model_len=wanted)
