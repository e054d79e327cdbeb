"""The quality of a configuration is measured as it is served, and judged by the rule that is printed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs

from engine_core.wire.evidence import Passage, QualityReport
from model_executor.errors import ConfigRefused, ToolMisused
from model_executor.tools import quality
from model_executor.tools.offline import Offline, OfflineOptions
from tests.model_executor.engine import load
from tests.model_executor.tools.folders import write_model

VOCAB = 320
LENGTH = 128
DRAWN = np.random.default_rng(5)
PASSAGE = Passage("drawn", "no digest", [7], DRAWN.integers(VOCAB, size=300).tolist(), VOCAB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "model", "llama")


def run(folder: Path, tmp_path: Path, *flags: str, passage: Passage = PASSAGE) -> tuple[int, QualityReport]:
    given, written = tmp_path / "passage.json", tmp_path / "quality.json"
    given.write_bytes(msgspec.json.encode(passage))
    status = quality.main([str(folder), "--passage", str(given), "--json", str(written), *flags])
    return status, msgspec.json.decode(written.read_bytes(), type=QualityReport)


def break_first(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Scale a weight of the first executor that is brought up, which is the configuration's."""
    made: list[Offline] = []

    def broken(options: OfflineOptions) -> Offline:
        made.append(Offline(options))
        if len(made) == 1:
            with torch.no_grad():
                made[0].executor.model.blocks[3].get_parameter("mlp_norm.weight").mul_(factor)
        return made[-1]

    monkeypatch.setattr(quality, "Offline", broken)


def test_float32_is_at_no_distance_from_itself(folder: Path, tmp_path: Path) -> None:
    status, report = run(folder, tmp_path, "--dtype", "float32")
    assert (status, report.failures, report.unverified) == (0, [], [])
    assert (report.windows, report.length, report.decoded) == (2, LENGTH, LENGTH // 2)
    assert report.positions == report.finite == 2 * (LENGTH - 1)
    assert (report.rise.value, report.divergence.value, report.agreement.value) == (0.0, 0.0, 1.0)
    assert report.perplexity == report.reference_perplexity


def test_the_numbers_are_those_of_a_model_by_itself(folder: Path, tmp_path: Path) -> None:
    """Perplexities against logits of the whole sequence in one pass, in the same dtypes."""
    status, report = run(folder, tmp_path, "--dtype", "bfloat16")
    windows = np.array(quality.cut(PASSAGE, LENGTH))
    assert windows.shape == (2, LENGTH)
    assert windows[:, 0].tolist() == [7, 7]
    loaded = load(folder)
    logits = [torch.from_numpy(loaded.logits(window.tolist())) for window in windows]
    losses = [
        torch.nn.functional.cross_entropy(row[:-1], torch.from_numpy(window[1:]))
        for row, window in zip(logits, windows, strict=True)
    ]
    assert report.reference_perplexity == pytest.approx(float(torch.stack(losses).mean().exp()), rel=1e-5)
    assert report.identity.dtype == "bfloat16"
    assert report.rise.value == pytest.approx(report.perplexity / report.reference_perplexity - 1, abs=1e-9)
    assert 1e-7 < report.divergence.value < 1e-3
    assert 0 < report.divergence.error < report.divergence.value
    # Random weights: likeliest tokens are near ties, which bfloat16 may decide otherwise.
    assert status == (1 if report.agreement.value < quality.AGREEMENT else 0)


def test_scores_of_known_distributions() -> None:
    likely = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    given = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]])
    scores = quality.compare(likely.log() + 3.0, given.log(), torch.tensor([0, 2]))
    assert scores.reference_loss.tolist() == pytest.approx([np.log(2), np.log(10)])
    assert scores.loss.tolist() == pytest.approx([np.log(4), np.log(10)])
    assert scores.divergence.tolist() == pytest.approx([0.5 * np.log(2) - 0.25 * np.log(2), 0.0], abs=1e-7)
    assert scores.agrees.tolist() == [0.0, 1.0]


def test_an_estimate_has_the_error_of_its_mean() -> None:
    found = quality.estimate(torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64))
    assert found.value == 3.0
    assert found.error == pytest.approx(np.std([1, 2, 3, 6], ddof=1) / 2)


def test_a_fault_breaks_the_rule(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_first(monkeypatch, 30.0)
    status, report = run(folder, tmp_path)
    assert status == 1
    assert set(report.failures) >= {quality.RULE[1], quality.RULE[2]}
    assert report.divergence.value > quality.DIVERGENCE
    assert report.agreement.value < quality.AGREEMENT


def test_numbers_that_are_not_finite_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_first(monkeypatch, float("inf"))
    given = tmp_path / "passage.json"
    given.write_bytes(msgspec.json.encode(PASSAGE))
    assert quality.main([str(folder), "--passage", str(given)]) == 3
    assert "dtype: 'float32': its numbers are not finite" in capsys.readouterr().err


def test_some_numbers_that_are_not_finite_fail(folder: Path) -> None:
    offline = Offline(OfflineOptions(folder, sequences=1, threads=1))

    def judged(loss: torch.Tensor) -> QualityReport:
        scores = quality.Scores(good, loss, 0 * good, good / good)
        return quality.judge(offline, "none", PASSAGE, scores, windows=1, length=5, decoded=2)

    good = torch.full((4,), 0.5, dtype=torch.float64)
    report = judged(torch.tensor([0.5, float("nan"), 0.5, 0.5], dtype=torch.float64))
    assert (report.positions, report.finite, report.failures) == (4, 3, [quality.RULE[3]])
    assert report.rise.value == 0.0
    with pytest.raises(ConfigRefused, match="not finite"):
        judged(good * float("inf"))


def test_blocks_that_did_not_run_are_named(folder: Path, tmp_path: Path) -> None:
    _, report = run(folder, tmp_path, "--layers", "first:2")
    assert report.unverified == ["the quality of the model: 4 of its 6 blocks did not run"]


def test_a_short_passage_is_refused() -> None:
    short = structs.replace(PASSAGE, token_ids=PASSAGE.token_ids[:126])
    with pytest.raises(ToolMisused, match="--tokens: 126, at least 127"):
        quality.cut(short, LENGTH)
    assert [len(window) for window in quality.cut(structs.replace(short, prefix=[]), 63)] == [63, 63]


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"source": 1}'])
def test_a_broken_passage_is_refused(
    folder: Path, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "passage.json"
    path.write_bytes(content)
    assert quality.main([str(folder), "--passage", str(path)]) == 2
    assert "--passage" in capsys.readouterr().err
