"""Token ids to vectors, and vectors to scores over token ids."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from model_executor.layers.linear import LinearKernel, Product, frozen_parameter


class Embedding(nn.Module):
    """A table of one row a token.

    Args:
        vocab_size, hidden_size: shape of the table.
        dtype, device: of the table.
        scale: the rows are multiplied by it, after it was rounded to the dtype.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.weight = frozen_parameter((vocab_size, hidden_size), dtype, device)
        self.scale = torch.tensor(scale).to(dtype).item()

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [T], each in 0 .. vocab_size - 1, to [T, hidden_size]."""
        rows = functional.embedding(token_ids, self.weight)
        return rows if self.scale == 1.0 else rows * self.scale


class TiedHead(nn.Module):
    """A head that scores with the embedding's rows; unless a kernel packs them it holds no memory of its own.

    Args:
        embedding: the table.
        kernel: see Linear.
    """

    def __init__(self, embedding: Embedding, kernel: LinearKernel | None = None) -> None:
        super().__init__()
        # Behind a tuple, so that the table is a parameter of one module only.
        self._embedding = (embedding,)
        self.kernel = kernel
        self.product: Product | None = None

    def pack(self) -> None:
        """See Linear; the table itself stays."""
        if self.kernel is not None:
            self.product = self.kernel.pack(self._embedding[0].weight.t(), None)
        if self.product is not None:
            self.register_buffer("packed", self.product.packed, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[S, hidden_size] to [S, vocab_size]."""
        if self.product is not None:
            return self.product(hidden)
        return functional.linear(hidden, self._embedding[0].weight)
