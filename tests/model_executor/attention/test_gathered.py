"""Which blocks rows read, and that no others matter."""

from __future__ import annotations

import pytest
import torch

from model_executor.attention.gathered import group_view, row_view
from model_executor.attention.torch_matmul import TorchMatmul
from model_executor.attention.torch_sdpa import TorchSdpa
from tests.model_executor.paged import Case, make_case, make_problem

WINDOW, SIZE = 6, 4
# A window of 6 at the contexts 40 .. 43 begins at each offset of a block; 3 is shorter than the window.
DECODES = [(39, 1), (40, 1), (41, 1), (42, 1), (2, 1)]


def case_of(rows: list[tuple[int, int]], window: int | None = WINDOW, poison: float = 1e4) -> Case:
    return make_case(make_problem(window=window, block_size=SIZE), rows, seed=5, poison=poison)


def test_a_group_gathers_the_blocks_of_its_window_only() -> None:
    batch = case_of(DECODES).batch
    view = group_view(batch, batch.decode_groups[0], WINDOW, SIZE)
    # 43, 42, 41, 40: the windows begin at 37, 36, 35, 34, in the blocks 9, 9, 8, 8, and touch at most three.
    blocks = batch.block_tables
    assert view.table.shape == (4, 3)
    assert view.table[0, :2].tolist() == blocks[0, 9:11].tolist()
    assert view.table[3, :2].tolist() == blocks[3, 8:10].tolist()
    assert view.mask is not None
    assert view.mask.sum(-1).flatten().tolist() == [WINDOW] * 4


def test_short_contexts_gather_what_they_have() -> None:
    batch = case_of([(2, 1)]).batch
    view = group_view(batch, batch.decode_groups[0], WINDOW, SIZE)
    assert (view.table.shape, view.last, view.mask) == ((1, 1), 3, None)


def test_a_prompt_gathers_from_its_first_query_s_window_on() -> None:
    batch = case_of([(20, 5)]).batch
    view = row_view(batch, 0, WINDOW, SIZE)
    # Query 20 sees 15 .. 20: from block 3 on.
    assert view.table.tolist() == [batch.block_tables[0, 3:7].tolist()]
    assert (view.first, view.last) == (3, 13)
    assert view.mask is not None
    assert view.mask.sum(-1).tolist() == [WINDOW] * 5


@pytest.mark.parametrize("kernel", [TorchSdpa, TorchMatmul])
@pytest.mark.parametrize("rows", [DECODES, [(20, 5), (33, 3)], [(50, 1), (9, 1), (30, 4)]], ids=str)
def test_what_lies_before_every_window_is_never_read(
    kernel: type[TorchSdpa] | type[TorchMatmul], rows: list[tuple[int, int]]
) -> None:
    """Blocks before a window may have gone to other sequences: NaN there reaches nothing."""
    case = case_of(rows)
    made = kernel(case.problem)
    expected = made.forward(case.query, case.cache[0], case.batch)
    for row, (count, context) in enumerate(zip(case.batch.query_lens, case.batch.context_lens_host, strict=True)):
        unread = max(0, context - count - WINDOW + 1) // SIZE
        for block in case.batch.block_tables[row, :unread].tolist():
            case.cache[0].key[block] = torch.nan
            case.cache[0].value[block] = torch.nan
    assert torch.equal(made.forward(case.query, case.cache[0], case.batch), expected)
