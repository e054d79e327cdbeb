"""Attention on gathered blocks as two products in float32, with a soft cap on the scores between them.

For what scaled_dot_product_attention cannot do. The queries of a long prompt are taken in portions, so that the
scores of one portion stay below SCORES_AT_ONCE numbers.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from model_executor.attention.gathered import GatheredAttention
from model_executor.attention.spec import AttentionKernel, KernelSpec, Limits
from model_executor.attention.torch_ref import visible

SCORES_AT_ONCE: Final = 2**22


class TorchMatmul(GatheredAttention):
    """See the module.

    Args:
        problem: what to compute.
    """

    def decode(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """See GatheredAttention."""
        return self._attend(query.float(), key.float(), value.float(), mask).to(query.dtype)

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """See GatheredAttention."""
        count, heads, dim = query.shape
        keys, kv_heads = key.shape[2], self.problem.num_kv_heads
        seen = visible(0, count, keys, None, query.device) if mask is None else mask
        per_head = query.float().view(count, kv_heads, -1, dim).permute(1, 2, 0, 3)
        key, value = key.float().transpose(0, 1), value.float().transpose(0, 1)
        portion = max(1, SCORES_AT_ONCE // (heads * keys))
        output = torch.empty_like(per_head)
        for first in range(0, count, portion):
            part = slice(first, first + portion)
            output[:, :, part] = self._attend(per_head[:, :, part], key, value, seen[part])
        return output.permute(2, 0, 1, 3).reshape(query.shape).to(query.dtype)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """softmax over keys of capped scores; the leading axes of all three broadcast."""
        cap = self.problem.soft_cap
        scores = (query * self.problem.scale) @ key.transpose(-1, -2)
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ value


SPEC: KernelSpec[AttentionKernel] = KernelSpec("torch_matmul", Limits(), TorchMatmul)
