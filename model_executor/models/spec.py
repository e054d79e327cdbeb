"""A model as data, read from its config.json alone: no torch, no weights.

The indices here are *source* indices: layer s of a ModelSpec is block s of the checkpoint, with its own window, RoPE
and kind. Which of the layers run, and in which order, is the LayerPlan's business (weights/layer_plan.py).
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

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

    @property
    def name(self) -> str:
        """What tells this rotation from another of the same model: "rope10000", "rope1000000-linear8"."""
        scaled = "" if self.kind == "default" else f"-{self.kind}{self.factor:g}"
        return f"rope{self.theta:.12g}{scaled}"


class NormSpec(Struct, frozen=True):
    """Root-mean-square norm.

    Attributes:
        eps: added to the mean square.
        offset: the checkpoint holds w and the norm multiplies by 1 + w, in float32 (Gemma).
    """

    eps: float
    offset: bool = False


class LatentSpec(Struct, frozen=True):
    """Latent attention (MLA; DeepSeek-AI, 2024): keys and values of all heads are made from one small vector a token.

    Attributes:
        kv_rank: width of the latent that keys and values are made from.
        nope_dim, rope_dim: elements of a head of queries and keys that are not rotated, and that are; the rotated
            part of the key is one for all heads.
        value_dim: elements of a head of values.
        query_rank: width of the latent that queries are made from; None: they are made from the hidden state.
        norm: of the latents.
        interleaved: the two elements of a rotated pair are neighbours in the checkpoint; otherwise half a head apart.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None
    norm: NormSpec
    interleaved: bool

    @property
    def width(self) -> int:
        """Elements that the cache keeps of a token."""
        return self.kv_rank + self.rope_dim


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
        qk_norm: norm of each head of queries and keys, before the rotation; None: there is none.
        latent: of kind "mla", whose head_dim is that of queries and keys; None: of any other.
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
    qk_norm: NormSpec | None = None
    latent: LatentSpec | None = None

    @property
    def kv_elements(self) -> int:
        """Elements that the cache keeps of a token."""
        return 2 * self.num_kv_heads * self.head_dim if self.latent is None else self.latent.width

    @property
    def class_name(self) -> str:
        """Kind, reach and rotation."""
        reach = "full" if self.window is None else f"sliding{self.window}"
        return f"{self.kind}-{reach}-{'nope' if self.rope is None else self.rope.name}"


class RoutingSpec(Struct, frozen=True):
    """How each token chooses its experts.

    Attributes:
        num_experts: to choose from.
        top_k: chosen by a token.
        score: what the router's output becomes; experts are ranked by it, and weighted by it.
        normalize: the weights of a token are divided by their sum.
        scale: the weights are then multiplied by it.
        groups: the experts are so many groups of equal size; a token chooses from its best groups only.
        top_groups: groups a token chooses from.
        group_score: what a group is ranked by: its best expert, or the sum of its best two.
        correction: a bias of each expert is added to its score for the ranking, not for the weight.
        wide: the router computes in float32 whatever the dtype.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"]
    normalize: bool
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"
    correction: bool = False
    wide: bool = False


class MoeSpec(Struct, frozen=True):
    """What a mixture of experts has beside the shape of an expert.

    Attributes:
        routing: the choice of experts.
        shared_size: width of the part that every token passes besides; 0: there is none.
    """

    routing: RoutingSpec
    shared_size: int = 0


class MlpSpec(Struct, frozen=True):
    """Feed-forward part of one block: down(activation(gate(x)) * up(x)).

    Attributes:
        intermediate_size: width of gate and up; of one expert, if there are experts.
        activation: on the gate.
        bias: whether the three projections have one; with experts: those of the shared part.
        kind: which implementation; a key of the decoder's table.
        moe: of kind "moe"; None: of any other.
    """

    intermediate_size: int
    activation: Activation
    bias: bool = False
    kind: str = "gated"
    moe: MoeSpec | None = None


class LayerSpec(Struct, frozen=True):
    """One block of the checkpoint.

    Attributes:
        source: its index in the checkpoint.
        attention, mlp, norm: its parts.
        sandwich: attention and feed-forward part have a norm after them too, before the sum.
        needs: source indices of the blocks whose state this one reads; it cannot run without them.
    """

    source: int
    attention: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec
    sandwich: bool = False
    needs: tuple[int, ...] = ()

    @property
    def class_name(self) -> str:
        """Name of the block's class: blocks of one class differ in weights only."""
        return f"{self.attention.class_name}+{self.mlp.kind}"


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
        embedding_scale: the embedding's rows are multiplied by it, rounded to the dtype computed in.
        final_soft_cap: logits become cap * tanh(logit / cap); None: as they are.
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
    embedding_scale: float = 1.0
    final_soft_cap: float | None = None


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
