"""Claims and their evidence: each claim stands once, in claims.toml, and is judged by the record it names."""

from __future__ import annotations

import operator
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from bench.errors import RecordInvalid
from bench.record import Record, read_record
from bench.sources import source_digests

CLAIMS: Final = "bench/claims.toml"
RECORDS: Final = "bench/records"
HOLDS: Final[Mapping[str, Callable[[float, float], bool]]] = {"at most": operator.le, "at least": operator.ge}
SHOWN: Final = 3


class Claim(Struct, frozen=True, forbid_unknown_fields=True):
    """One claim of the README.

    Attributes:
        id: short name.
        text: the claim, as the README tells it.
        record: file in bench/records with the smallest evidence that could disprove it.
        figure: where in the record's results the number is, see find.
        must_be, limit: what the number has to be.
        unit: of both.
        files: files and folders of the product that the claim is about; when one changes, the evidence is too old.
    """

    id: str
    text: str
    record: str
    figure: str
    must_be: Literal["at most", "at least"]
    limit: float
    files: list[str]
    unit: str = ""


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    claim: list[Claim] = []


class Evidence(Struct, frozen=True):
    """What a record says of a claim.

    Attributes:
        claim: it is about.
        record: None where there is none.
        measured: the number; None where the record has none.
        faults: why the claim does not stand; empty: it does.
    """

    claim: Claim
    record: Record | None
    measured: float | None
    faults: list[str]


def read_claims(root: Path) -> list[Claim]:
    """All claims.

    Raises:
        RecordInvalid: the file is wrong, or two claims share an id.
    """
    path = root / CLAIMS
    try:
        found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File).claim
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise RecordInvalid(f"{path}: {error}") from error
    ids = [claim.id for claim in found]
    if twice := {name for name in ids if ids.count(name) > 1}:
        raise RecordInvalid(f"{path}: id: twice: {', '.join(sorted(twice))}")
    return found


def judge(claim: Claim, root: Path) -> Evidence:
    """Whether a claim has a record that is no older than the code, and whose number is within the limit."""
    try:
        record = read_record(root / RECORDS / claim.record)
    except RecordInvalid as error:
        return Evidence(claim, None, None, [f"no evidence: {error}"])
    faults = []
    try:
        measured = find(record.results, claim.figure)
    except LookupError as error:
        measured = None
        faults.append(f"{claim.record} has no figure {claim.figure!r}: {error}")
    if measured is not None and not HOLDS[claim.must_be](measured, claim.limit):
        faults.append(f"{claim.figure} is {measured:g}, must be {claim.must_be} {claim.limit:g}")
    return Evidence(claim, record, measured, faults + changed(claim, record, root))


def changed(claim: Claim, record: Record, root: Path) -> list[str]:
    """What of the claim's files is not what was measured."""
    now = source_digests(claim.files, root)
    if not now:
        return [f"files: nothing is at {', '.join(claim.files)}"]
    then = {path: digest for path, digest in record.sources.items() if path in now or _within(path, claim.files)}
    different = sorted({path for path, digest in (now.items() ^ then.items())})
    if not different:
        return []
    more = f" and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
    return [f"{claim.record} is older than {', '.join(different[:SHOWN])}{more}: measure again"]


def _within(path: str, patterns: Sequence[str]) -> bool:
    parts = Path(path)
    return any(parts.is_relative_to(pattern) or parts.match(pattern) for pattern in patterns)


def find(results: object, figure: str) -> float:
    """A number in the results of a record.

    Args:
        results: a list of results.
        figure: steps with "/" between them: KEY=VALUE takes the result with that value (KEY=VALUE,KEY=VALUE with
            all of them), a number the one at that place, and KEY goes into it. A list of one result needs no step.

    Raises:
        LookupError: there is no such number.
    """
    at: Any = results
    for step in figure.split("/"):
        if isinstance(at, list):
            at, went = _pick(at, step)
            if went:
                continue
        if not isinstance(at, dict) or step not in at:
            raise LookupError(f"there is no {step!r}")
        at = at[step]
    if type(at) in {int, float}:
        return float(at)
    raise LookupError(f"{at!r} is no number")


def _pick(results: list[Any], step: str) -> tuple[Any, bool]:
    """The result that a step means, and whether the step is used up by that."""
    if "=" in step:
        wanted = [condition.partition("=") for condition in step.split(",")]
        dicts = [one for one in results if isinstance(one, dict)]
        chosen = [one for one in dicts if all(str(one.get(key)) == value for key, _, value in wanted)]
        if len(chosen) != 1:
            raise LookupError(f"{len(chosen)} results have {step}")
        return chosen[0], True
    if step.isdigit() and int(step) < len(results):
        return results[int(step)], True
    if len(results) != 1:
        raise LookupError(f"{len(results)} results: {step!r} does not say which")
    return results[0], False
