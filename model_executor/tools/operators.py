"""The operators that a block of each kind runs, and the requests that make it run them. Data, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from model_executor.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec

REQUESTS: Final[Mapping[str, str]] = {
    "prefill": "a prompt of two tokens or more, max_tokens 1",
    "decode": "any prompt, max_tokens 2 or more",
    "mixed": "a prompt sent while another request decodes",
}
"""What makes each phase run; every operator below runs in all three."""

ATTENTION_OPERATORS: Final[Mapping[str, tuple[str, ...]]] = {
    "grouped": ("linear: qkv", "kv_append", "attention", "linear: output"),
    "mla": ("linear: query and latent", "rms_norm: latent", "kv_append: latent", "attention: latent", "linear: output"),
}
MLP_OPERATORS: Final[Mapping[str, tuple[str, ...]]] = {
    "gated": ("linear: gate and up, gated", "linear: down"),
    "moe": ("router", "experts: grouped linear, gated activation"),
}


def block_operators(layer: LayerSpec) -> tuple[str, ...]:
    """Operators of one block, in the order they run."""
    norms = ("rms_norm", "rms_norm: after each part") if layer.sandwich else ("rms_norm",)
    return (*norms, *_attention(layer.attention), *_mlp(layer.mlp))


def outer_operators(spec: ModelSpec) -> tuple[str, ...]:
    """Operators outside the blocks."""
    cap = () if spec.final_soft_cap is None else ("soft cap of the logits",)
    return ("embedding", "rms_norm", "linear: head", *cap, "sampling")


def special_requests(layer: LayerSpec) -> tuple[str, ...]:
    """What a request must be like for the block's special paths, beside the phases."""
    window = layer.attention.window
    return () if window is None else (f"a prompt longer than the window of {window} tokens",)


def heads_operators(spec: AttentionSpec) -> tuple[str, ...]:
    """What grouped attention does between its projection and the attention itself."""
    return (*_before_append(spec), "kv_append")


def _attention(spec: AttentionSpec) -> tuple[str, ...]:
    first, *rest = ATTENTION_OPERATORS[spec.kind]
    return (first, *_before_append(spec), *rest)


def _before_append(spec: AttentionSpec) -> tuple[str, ...]:
    norm = () if spec.qk_norm is None else ("rms_norm: heads of queries and keys",)
    rotary = () if spec.rope is None else (f"rotary: {spec.rope.name}",)
    return (*norm, *rotary)


def _mlp(spec: MlpSpec) -> tuple[str, ...]:
    shared = ("shared experts",) if spec.moe is not None and spec.moe.shared_size else ()
    return (*MLP_OPERATORS[spec.kind], *shared)
