"""The ledger, and the README's table."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from bench import ledger as subject
from bench.claims import CLAIMS, RECORDS, judge, read_claims
from bench.errors import UsageError
from bench.ledger import BEGIN, END, LEDGER, README, ledger, unwritten, write
from bench.record import write_record
from bench.sources import ROOT, source_digests
from tests.bench.records import record

CLAIM = """
[[claim]]
id = "fast"
text = "It is fast | always."
record = "fast.json"
figure = "rate"
must_be = "at least"
limit = 10
unit = "tok/s"
files = ["frontend"]
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree with one claim."""
    (tmp_path / "frontend").mkdir()
    (tmp_path / "frontend" / "a.py").write_text("x = 1\n")
    made = record("serve", [{"rate": 12.0}], sources=source_digests(["frontend"], tmp_path))
    write_record(made, tmp_path / RECORDS / "fast.json")
    (tmp_path / CLAIMS).write_text(CLAIM)
    (tmp_path / README).write_text(f"# Head\n\n{BEGIN}\n{END}\n\nTail\n")
    return tmp_path


def test_both_tables_are_made_from_the_claims(tree: Path) -> None:
    evidence = [judge(claim, tree) for claim in read_claims(tree)]
    assert len(unwritten(tree, evidence)) == 2
    write(tree, evidence)
    assert unwritten(tree, evidence) == []
    readme = (tree / README).read_text()
    assert readme.startswith("# Head\n")
    assert readme.endswith("Tail\n")
    assert "| It is fast \\| always. | 12 tok/s (at least 10 tok/s) | [fast](bench/LEDGER.md#fast) |" in readme
    for part in ("## fast", "records/fast.json", "`tercet bench serve --seed 'a b'`", "2026-01-02", "0123456789ab"):
        assert part in (tree / LEDGER).read_text()


@pytest.mark.parametrize("name", [README, LEDGER])
def test_a_row_by_hand_is_found(name: str, tree: Path) -> None:
    evidence = [judge(claim, tree) for claim in read_claims(tree)]
    write(tree, evidence)
    path = tree / name
    path.write_text(path.read_text().replace("12 tok/s", "99 tok/s"))
    assert [fault.split(":")[0] for fault in unwritten(tree, evidence)] == [name]


def test_the_command_tells_what_stands_and_what_falls(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subject, "ROOT", tree)
    assert subject.run(Namespace(write=True)) == 0
    assert capsys.readouterr().out == "stands  fast: 12 tok/s (at least 10 tok/s)\n"
    (tree / "frontend" / "a.py").write_text("x = 2\n")
    assert subject.run(Namespace(write=False)) == 1
    told = capsys.readouterr()
    assert told.out.startswith("FALLS  fast")
    assert "fast: fast.json is older than frontend/a.py" in told.err


def test_a_readme_without_a_place_for_the_table_is_refused(tree: Path) -> None:
    (tree / README).write_text("# Head\n")
    with pytest.raises(UsageError, match="it has no lines"):
        write(tree, [])


def test_the_ledger_without_claims_says_what_it_is() -> None:
    assert ledger([]).startswith("# Ledger\n")


def test_readme_and_ledger_of_this_tree_say_what_claims_and_records_do() -> None:
    assert unwritten(ROOT, [judge(claim, ROOT) for claim in read_claims(ROOT)]) == []
