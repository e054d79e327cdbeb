"""The quality report for people."""

from __future__ import annotations

from msgspec import structs

from frontend.proof.quality import lines
from tests.frontend.proof.examples import quality


def test_rule_and_result_are_told() -> None:
    report = quality()
    text = "\n".join(lines(report))
    assert "perplexity: 10.0100, float32 10.0000: +0.10% +- 0.05%" in text
    assert "KL(float32 || configuration): 0.00140 +- 0.00010" in text
    assert "same likeliest token: 96.80% +- 0.40%" in text
    assert f"text: {report.source}, sha256 {report.sha256}" in text
    assert [line for line in lines(report) if line.startswith("rule: ")] == [
        f"rule: {line}: kept" for line in report.rule
    ]
    assert text.endswith("verdict: pass")


def test_a_broken_rule_is_named() -> None:
    report = quality()
    told = lines(structs.replace(report, failures=report.rule[1:2], unverified=["the rest"]))
    assert f"rule: {report.rule[0]}: kept" in told
    assert f"rule: {report.rule[1]}: broken" in told
    assert told[-2:] == ["unverified: the rest", "verdict: fail"]
