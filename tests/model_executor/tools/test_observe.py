"""Observers see what passes the borders of blocks, whatever shape a block's answer has."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_executor.tools.observe import EMBEDDING, FINAL_NORM, Observer, block_names


class Twice(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states * 2


class Pair(nn.Module):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, str]:
        return hidden_states + 1, "more"


def test_values_by_place_over_steps() -> None:
    blocks, norm = [Twice(), Pair()], nn.Identity()
    names = block_names([4, 7], ["a", "b"])
    assert names == ["block 0 <- 4 a", "block 1 <- 7 b"]
    with Observer(blocks, norm, names) as seen:
        for value in (1.0, 5.0):
            x = torch.full((2, 3), value)
            first = blocks[0](hidden_states=x)
            norm(blocks[1](first)[0])
            # What was seen is a copy.
            first.zero_()
        taken = seen.take()
    assert list(taken) == [EMBEDDING, *names, FINAL_NORM]
    assert {place: values[:, 0].tolist() for place, values in taken.items()} == {
        EMBEDDING: [1, 1, 5, 5],
        names[0]: [2, 2, 10, 10],
        names[1]: [3, 3, 11, 11],
        FINAL_NORM: [3, 3, 11, 11],
    }
    assert seen.take() == {}
    blocks[0](hidden_states=torch.ones(1, 3))
    assert seen.take() == {}
