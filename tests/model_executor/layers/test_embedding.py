from __future__ import annotations

import torch

from model_executor.layers.embedding import Embedding, Head, TiedHead
from tests.model_executor.engine import CPU


def table() -> Embedding:
    """Three tokens of width two."""
    embedding = Embedding(3, 2, torch.float32, CPU)
    embedding.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    return embedding


def test_embedding_by_hand() -> None:
    assert table()(torch.tensor([2, 0])).tolist() == [[5.0, 6.0], [1.0, 2.0]]


def test_tied_head_scores_with_the_rows() -> None:
    embedding = table()
    head = TiedHead(embedding)
    assert head(torch.tensor([[1.0, 10.0]])).tolist() == [[21.0, 43.0, 65.0]]
    assert list(head.parameters()) == []
    embedding.weight[0, 0] = 2.0
    assert head(torch.tensor([[1.0, 10.0]])).tolist()[0][0] == 22.0


def test_heads_agree() -> None:
    embedding = table()
    own = Head(2, 3, torch.float32, CPU)
    own.weight.copy_(embedding.weight.t())
    hidden = torch.tensor([[1.0, 10.0], [-1.0, 0.5]])
    assert torch.equal(own(hidden), TiedHead(embedding)(hidden))
