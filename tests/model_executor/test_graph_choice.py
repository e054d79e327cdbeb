"""How steps of single tokens run, and why."""

from __future__ import annotations

import pytest

from engine_core.wire.config import ExecutorOptions
from model_executor.graph_choice import choose_graphs

DEFAULT = (1, 2, 4, 8, 16, 32, 64, 128)


@pytest.mark.parametrize(
    ("options", "device", "waits", "chosen", "buckets"),
    [
        (ExecutorOptions(), "cpu", False, "as_it_is", ()),
        (ExecutorOptions(), "cuda", False, "cuda_graph", DEFAULT),
        (ExecutorOptions(), "cuda", True, "as_it_is", ()),
        (ExecutorOptions(enforce_eager=True), "cuda", False, "as_it_is", ()),
        (ExecutorOptions(cuda_graph_sizes=(8, 3)), "cpu", False, "static_buffers", (3, 8)),
        (ExecutorOptions(cuda_graph_sizes=(8, 3)), "cpu", True, "static_buffers", (3, 8)),
        (ExecutorOptions(cuda_graph_sizes=(8, 500)), "cuda", False, "cuda_graph", (8, 200)),
        (ExecutorOptions(cuda_graph_sizes=(8,), enforce_eager=True), "cpu", False, "as_it_is", ()),
    ],
)
def test_what_is_chosen(
    options: ExecutorOptions, device: str, waits: bool, chosen: str, buckets: tuple[int, ...]
) -> None:
    choice = choose_graphs(options, device, waits_for_device=waits, max_rows=200)
    assert choice.buckets == buckets
    report = choice.report()
    assert report.chosen == chosen
    assert report.operator == "decode_step"
    for candidate in report.candidates:
        assert bool(candidate.reasons) == (candidate.name != chosen and candidate.name != "as_it_is")
        if candidate.name == chosen:
            break


def test_the_reasons_name_the_option_or_the_fact() -> None:
    off = choose_graphs(ExecutorOptions(enforce_eager=True), "cuda", waits_for_device=True, max_rows=8).report()
    reasons = {candidate.name: candidate.reasons for candidate in off.candidates}
    assert reasons["cuda_graph"] == ["--enforce-eager", "the model reads results on the host within a step"]
    assert reasons["as_it_is"] == []
    assert off.problem == "steps of single tokens, padded to 1, 2, 4, 8 rows"


def test_a_capture_that_was_refused_stands_in_the_report() -> None:
    choice = choose_graphs(ExecutorOptions(), "cuda", waits_for_device=False, max_rows=8)
    report = choice.report("a kernel reads lengths on the host")
    assert report.chosen == "as_it_is"
    assert report.candidates[0].reasons == ["a kernel reads lengths on the host"]
