"""Token ids to vectors, and vectors to scores over token ids."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from model_executor.layers.linear import Linear, frozen_parameter


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


class Head(Linear):
    """A head with a weight of its own."""

    def __init__(self, hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(hidden_size, vocab_size, bias=False, dtype=dtype, device=device)


class TiedHead(nn.Module):
    """A head that scores with the embedding's rows; it holds no memory of its own.

    Args:
        embedding: the table.
    """

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        # Behind a tuple, so that the table is a parameter of one module only.
        self._embedding = (embedding,)

    def forward(self, hidden: Tensor) -> Tensor:
        """[S, hidden_size] to [S, vocab_size]."""
        return functional.linear(hidden, self._embedding[0].weight)
