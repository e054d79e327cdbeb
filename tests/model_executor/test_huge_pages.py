"""Memory in huge pages: what it is, that it is zero, and that pieces do not meet."""

from __future__ import annotations

import torch

from model_executor.huge_pages import ALIGNMENT, CHUNK, HUGE_PAGE, Arena


def test_a_chunk_begins_a_huge_page_and_a_piece_is_of_the_size_asked_for() -> None:
    for size in (0, 1, HUGE_PAGE - 1, 3 * HUGE_PAGE + 5):
        memory = Arena(size).take(size)
        assert (memory.shape, memory.dtype) == ((size,), torch.uint8)
        assert memory.data_ptr() % HUGE_PAGE == 0 or not size
        assert not memory.any()


def test_pieces_of_an_arena_do_not_meet() -> None:
    arena = Arena()
    pieces = [arena.take(size) for size in (1, 64, 65, 0, CHUNK + 1, 7, CHUNK // 2, CHUNK // 2, 3)]
    for number, piece in enumerate(pieces, 1):
        assert not piece.any()
        piece.fill_(number)
    for number, piece in enumerate(pieces, 1):
        assert bool((piece == number).all())
        assert piece.data_ptr() % ALIGNMENT == 0 or not len(piece)


def test_memory_lives_as_long_as_a_tensor_in_it() -> None:
    piece = Arena().take(4096).view(torch.float32)[5:]
    piece.fill_(2.0)
    assert float(piece.sum()) == 2.0 * (1024 - 5)
