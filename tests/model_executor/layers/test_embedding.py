from __future__ import annotations

import pytest
import torch

from model_executor.layers.embedding import Embedding, TiedHead
from model_executor.layers.linear import Linear
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
    own = Linear(2, 3, bias=False, dtype=torch.float32, device=CPU)
    own.weight.copy_(embedding.weight.t())
    hidden = torch.tensor([[1.0, 10.0], [-1.0, 0.5]])
    assert torch.equal(own(hidden), TiedHead(embedding)(hidden))


def test_scaled_embedding_by_hand() -> None:
    embedding = Embedding(2, 1, torch.float32, CPU, scale=3.0)
    embedding.weight.copy_(torch.tensor([[1.0], [2.0]]))
    assert embedding(torch.tensor([1, 0])).tolist() == [[6.0], [3.0]]
    assert TiedHead(embedding)(torch.tensor([[1.0]])).tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [48, 2304, 3072])
def test_scaled_embedding_equals_transformers(dtype: torch.dtype, hidden: int) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    theirs = Gemma3TextScaledWordEmbedding(7, hidden, 0, embed_scale=hidden**0.5).to(dtype)
    ours = Embedding(7, hidden, dtype, CPU, scale=hidden**0.5)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(7, hidden, generator=torch.Generator().manual_seed(0)))
        ours.weight.copy_(theirs.weight)
        ids = torch.tensor([3, 6, 0])
        assert torch.equal(ours(ids), theirs(ids))
