"""A quality report for people, and the run that makes it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine_core.wire.evidence import Estimate, Passage, QualityReport
from frontend.proof.tools import QUALITY, run_tool


def run_quality(model: Path, flags: Sequence[str], passage: Passage) -> QualityReport:
    """Compare a configuration with float32 on a passage.

    Args:
        model: the folder.
        flags: of the configuration.
        passage: to read.

    Raises:
        StartError: the model or the configuration is refused.
    """
    with tempfile.TemporaryDirectory(prefix="tercet-") as folder:
        path = Path(folder) / "passage.json"
        path.write_bytes(msgspec.json.encode(passage))
        return run_tool(QUALITY, [str(model), *flags, "--passage", str(path)], QualityReport)


def lines(report: QualityReport) -> list[str]:
    """The report as lines; the verdict is the last."""
    identity, environment = report.identity, report.environment
    blocks = f"{len(identity.layer_map)} of {identity.blocks} blocks"
    parts = f"{report.windows} windows of {report.length} tokens, {report.decoded} of each computed one by one"
    return [
        f"{identity.architecture} {identity.revision}: {blocks} in {identity.numbers}, against float32",
        f"machine: {environment.machine}, {environment.threads} threads, torch {environment.torch}",
        f"text: {report.source}, sha256 {report.sha256}",
        f"{parts}: {report.positions} positions, {report.finite} of them with finite numbers alone",
        "",
        f"perplexity: {report.perplexity:.4f}, float32 {report.reference_perplexity:.4f}: {_percent(report.rise)}",
        f"KL(float32 || configuration): {report.divergence.value:.5f} +- {report.divergence.error:.5f}",
        f"same likeliest token: {report.agreement.value:.2%} +- {report.agreement.error:.2%}",
        "(+-: standard error, as of independent positions)",
        "",
        *(f"rule: {line}: {'broken' if line in report.failures else 'kept'}" for line in report.rule),
        *(f"unverified: {line}" for line in report.unverified),
        f"verdict: {'fail' if report.failures else 'pass'}",
    ]


def _percent(estimate: Estimate) -> str:
    return f"{estimate.value:+.2%} +- {estimate.error:.2%}"
