"""How the cases of the fault matrix went, for people and programs."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct


class Record(Struct):
    """How a case went.

    Attributes:
        case: its name; ok: whether all was as it must be; faults: what was not.
        detect_s: from the fault to the first sign of it; recover_s: to the end of the trouble; None: no trouble showed.
        requests: how many were under way; seconds: the whole case.
    """

    case: str
    ok: bool = False
    faults: list[str] = []
    detect_s: float | None = None
    recover_s: float | None = None
    requests: int = 0
    seconds: float = 0.0


def table(records: list[Record]) -> str:
    """The records as a Markdown table."""
    show: Callable[[float | None], str] = lambda seconds: "-" if seconds is None else f"{seconds:.2f}"  # noqa: E731
    lines = ["| case | result | requests | detect s | recover s |", "|---|---|---|---|---|"]
    for record in records:
        result = "ok" if record.ok else "; ".join(record.faults).replace("|", "/")[:300]
        times = f"{show(record.detect_s)} | {show(record.recover_s)}"
        lines.append(f"| {record.case} | {result} | {record.requests} | {times} |")
    passed = sum(record.ok for record in records)
    return "\n".join([*lines, "", f"{passed} of {len(records)} cases ok"])
