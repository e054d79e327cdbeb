"""A parity report for people."""

from __future__ import annotations

from engine_core.wire.evidence import Boundary, Disagreement, ParityReport
from model_executor.tools.table import table
from model_executor.weights.layer_plan import compact


def parity_lines(report: ParityReport) -> list[str]:
    """The report as lines; the verdict is the last."""
    identity = report.identity
    blocks = f"{len(identity.layer_map)} of {identity.blocks} blocks ({compact(identity.layer_map)})"
    rate = report.agreed / report.positions
    return [
        f"{identity.architecture} {identity.revision}: {blocks} in {identity.numbers}, against {report.reference}",
        f"pack {report.pack}: {', '.join(report.samples)}",
        "",
        *_boundary_lines(report.boundaries, report.wide),
        "",
        f"teacher-forced greedy tokens: {report.agreed} of {report.positions} agree ({rate:.2%})",
        f"free-running samples: {report.free_equal} of {len(report.samples)} equal",
        *[
            f"  {name}: first difference at token {first}"
            for name, first in zip(report.samples, report.free_first, strict=True)
            if first is not None
        ],
        *_disagreement_lines(report.disagreements),
        "",
        *(f"rule: {line}" for line in report.rule),
        *(f"unverified: {line}" for line in report.unverified),
        *(f"failed: {line}" for line in report.failures),
        f"verdict: {'fail' if report.failures else 'pass'}",
    ]


def _boundary_lines(boundaries: list[Boundary], wide: str) -> list[str]:
    rows = [
        (
            row.place,
            f"{row.run.relative:.2e}",
            f"{row.noise.relative:.2e}",
            f"{1 - row.run.cosine:.1e}",
            f"{row.run.largest:.2e}",
            f"{row.noise.largest:.2e}",
            "" if row.within else "OUTSIDE",
        )
        for row in boundaries
    ]
    titles = (f"against {wide}", "relative L2", "noise", "1 - cosine", "largest", "noise", "")
    return table(titles, rows)


def _disagreement_lines(disagreements: list[Disagreement]) -> list[str]:
    return [
        f"  {each.sample} token {each.position}: {each.chosen} for {each.expected}, lead {each.chosen_margin:.2e} "
        f"(reference {each.expected_margin:.2e}), first place outside the noise: {each.first_place or 'none'}"
        for each in disagreements
    ]
