"""`tercet bench ledger`: checks every claim of the README against its evidence, and writes both tables.

A claim is added in one place: bench/claims.toml. `--write` makes the README's table and bench/LEDGER.md out of it.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.claims import CLAIMS, RECORDS, Evidence, judge, read_claims
from bench.errors import UsageError
from bench.sources import ROOT

EXIT_FAILED: Final = 1
README: Final = "README.md"
LEDGER: Final = "bench/LEDGER.md"
BEGIN: Final = "<!-- claims: made by `tercet bench ledger --write` out of bench/claims.toml -->"
END: Final = "<!-- end of claims -->"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--write", action="store_true", help="write the tables first")


def run(args: argparse.Namespace) -> int:
    """Check, and tell; gives 1 when a claim does not stand."""
    if not (ROOT / CLAIMS).is_file():
        raise UsageError(f"tercet bench ledger: {ROOT / CLAIMS}: only a source tree has claims")
    evidence = [judge(claim, ROOT) for claim in read_claims(ROOT)]
    if args.write:
        write(ROOT, evidence)
    faults = [f"{one.claim.id}: {fault}" for one in evidence for fault in one.faults] + unwritten(ROOT, evidence)
    for one in evidence:
        print(f"{'stands' if not one.faults else 'FALLS'}  {one.claim.id}: {measured(one)}")
    for fault in faults:
        print(fault, file=sys.stderr)
    return EXIT_FAILED if faults else 0


def measured(evidence: Evidence) -> str:
    """The number beside its limit."""
    claim = evidence.claim
    limit = f"{claim.must_be} {claim.limit:g} {claim.unit}".strip()
    if evidence.measured is None:
        return f"not measured ({limit})"
    return f"{evidence.measured:.4g} {claim.unit}".strip() + f" ({limit})"


def write(root: Path, evidence: Sequence[Evidence]) -> None:
    """Write both tables.

    Raises:
        UsageError: the README has no place for its own.
    """
    readme = root / README
    readme.write_text(_with_table(readme.read_text(encoding="utf-8"), evidence), encoding="utf-8")
    (root / LEDGER).write_text(ledger(evidence), encoding="utf-8")


def unwritten(root: Path, evidence: Sequence[Evidence]) -> list[str]:
    """Which of the two files does not say what the claims and their records do."""
    readme = (root / README).read_text(encoding="utf-8")
    path = root / LEDGER
    found = []
    if _with_table(readme, evidence) != readme:
        found.append(f"{README}: its claims are not those of {CLAIMS}: tercet bench ledger --write")
    if not path.is_file() or path.read_text(encoding="utf-8") != ledger(evidence):
        found.append(f"{LEDGER}: is not what {CLAIMS} and {RECORDS} give: tercet bench ledger --write")
    return found


def _with_table(readme: str, evidence: Sequence[Evidence]) -> str:
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UsageError(f"{README}: it has no lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{claims_table(evidence)}\n{END}{after}"


def claims_table(evidence: Sequence[Evidence]) -> str:
    """The README's table."""
    lines = ["| claim | measured | evidence |", "| --- | --- | --- |"]
    lines += [
        f"| {_cell(one.claim.text)} | {measured(one)} | [{one.claim.id}]({LEDGER}#{one.claim.id}) |" for one in evidence
    ]
    return "\n".join(lines)


def ledger(evidence: Sequence[Evidence]) -> str:
    """All of LEDGER.md."""
    head = (
        "# Ledger\n\n"
        "What each claim of the README rests on: the smallest measurement that could disprove it. Made by\n"
        "`tercet bench ledger --write` out of `claims.toml`; a test fails where a record is missing, its number is\n"
        "beyond the limit, or one of the files named here has changed since (comments and docstrings aside).\n"
    )
    return "\n".join([head, *map(_entry, evidence)])


def _entry(evidence: Evidence) -> str:
    claim, record = evidence.claim, evidence.record
    facts = {"limit": f"{claim.must_be} {claim.limit:g} {claim.unit}".strip(), "measured": measured(evidence)}
    if record is not None:
        facts |= {
            "date": record.date,
            "command": f"`{shlex.join(record.command)}`",
            "machine": f"{record.hardware.processor}, {record.hardware.cores} cores",
            "commit": f"{record.environment.get('commit', 'unknown')[:12]}, "
            f"changed files: {record.environment.get('changed files', 'unknown')}",
        }
    facts |= {
        "record": f"[records/{claim.record}](records/{claim.record}), `{claim.figure}`",
        "speaks of": ", ".join(f"`{name}`" for name in claim.files),
    }
    rows = "\n".join(f"| {name} | {_cell(text)} |" for name, text in facts.items())
    return f"## {claim.id}\n\n{claim.text}\n\n| | |\n| --- | --- |\n{rows}\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
