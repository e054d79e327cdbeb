"""Attention on gathered blocks with torch's scaled_dot_product_attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from model_executor.attention.gathered import GatheredAttention
from model_executor.attention.spec import AttentionKernel, KernelSpec, Limits


class TorchSdpa(GatheredAttention):
    """See the module.

    Args:
        problem: what to compute.
    """

    def decode(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """See GatheredAttention."""
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.problem.scale)

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """See GatheredAttention."""
        output = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.problem.scale,
            enable_gqa=self.problem.num_heads != self.problem.num_kv_heads,
        )
        return output[0].transpose(0, 1)


SPEC: KernelSpec[AttentionKernel] = KernelSpec("torch_sdpa", Limits(soft_cap=False), TorchSdpa)
