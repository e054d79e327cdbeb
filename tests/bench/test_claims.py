"""Claims judged by their records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.claims import CLAIMS, RECORDS, Claim, find, judge, read_claims
from bench.errors import RecordInvalid
from bench.record import write_record
from bench.sources import ROOT, source_digests
from tests.bench.records import record

CLAIM = Claim("fast", "It is fast.", "fast.json", "n=2/rate", "at least", 10.0, ["frontend", "engine_core/b.py"])
RESULTS: list[dict[str, Any]] = [{"n": 1, "rate": 5.0}, {"n": 2, "rate": 12.0, "deep": {"er": 3, "name": "x"}}]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree with a record that was made of it."""
    for name in ("frontend/a.py", "engine_core/b.py", "engine_core/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    sources = source_digests(["frontend", "engine_core"], tmp_path)
    write_record(record("serve", RESULTS, sources=sources), tmp_path / RECORDS / CLAIM.record)
    return tmp_path


def changed(**fields: Any) -> Claim:
    """The claim with other fields."""
    values = {name: getattr(CLAIM, name) for name in CLAIM.__struct_fields__}
    return Claim(**(values | fields))


def test_a_claim_stands_on_a_record_of_this_code(tree: Path) -> None:
    evidence = judge(CLAIM, tree)
    assert (evidence.measured, evidence.faults) == (12.0, [])


def test_it_falls_without_a_record(tree: Path) -> None:
    (tree / RECORDS / CLAIM.record).unlink()
    assert "no evidence" in judge(CLAIM, tree).faults[0]


def test_it_falls_beyond_its_limit(tree: Path) -> None:
    assert judge(changed(limit=12.5), tree).faults == ["n=2/rate is 12, must be at least 12.5"]
    assert judge(changed(must_be="at most"), tree).faults == ["n=2/rate is 12, must be at most 10"]
    assert judge(changed(limit=12.0), tree).faults == []


def test_it_falls_when_its_number_is_gone(tree: Path) -> None:
    assert "has no figure" in judge(changed(figure="n=2/speed"), tree).faults[0]


@pytest.mark.parametrize("name", ["frontend/a.py", "frontend/new.py", "engine_core/b.py"])
def test_it_falls_when_its_files_change_or_come(name: str, tree: Path) -> None:
    (tree / name).write_text("x = 2\n")
    assert judge(CLAIM, tree).faults == [f"fast.json is older than {name}: measure again"]


def test_it_falls_when_a_file_goes(tree: Path) -> None:
    (tree / "frontend/b.py").write_text("")
    (tree / "frontend/a.py").unlink()
    assert judge(CLAIM, tree).faults == ["fast.json is older than frontend/a.py, frontend/b.py: measure again"]


def test_other_files_and_comments_may_change(tree: Path) -> None:
    (tree / "engine_core/c.py").write_text("x = 2\n")
    (tree / "frontend/a.py").write_text("# More to read.\nx = 1\n")
    assert judge(CLAIM, tree).faults == []


def test_a_claim_about_no_file_falls(tree: Path) -> None:
    assert judge(changed(files=["nowhere"]), tree).faults == ["files: nothing is at nowhere"]


def test_numbers_are_found_by_steps() -> None:
    assert find(RESULTS, "n=1/rate") == 5.0
    assert find(RESULTS, "1/deep/er") == 3.0
    assert find(RESULTS[:1], "rate") == 5.0
    assert find([{"a": 1, "b": b, "x": 10 * b} for b in (1, 2)], "a=1,b=2/x") == 20


@pytest.mark.parametrize("figure", ["rate", "n=3/rate", "2/rate", "n=2/deep", "n=2/deep/name", "n=2/rate/x", "deep/er"])
def test_what_is_no_number_is_not_found(figure: str) -> None:
    with pytest.raises(LookupError):
        find(RESULTS, figure)


def test_claims_are_read_and_must_have_names_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / CLAIMS
    path.parent.mkdir()
    one = '[[claim]]\nid="a"\ntext="t"\nrecord="r"\nfigure="f"\nmust_be="at most"\nlimit=1\nfiles=["x"]\n'
    path.write_text(one)
    assert [claim.id for claim in read_claims(tmp_path)] == ["a"]
    for wrong in (one + one, one.replace("at most", "about"), one + "more=1\n", "["):
        path.write_text(wrong)
        with pytest.raises(RecordInvalid, match=r"claims\.toml"):
            read_claims(tmp_path)


def test_every_claim_of_this_tree_stands() -> None:
    fallen = {claim.id: faults for claim in read_claims(ROOT) if (faults := judge(claim, ROOT).faults)}
    assert fallen == {}
