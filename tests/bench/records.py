"""Records for tests."""

from __future__ import annotations

from typing import Any

from bench.record import Hardware, Record


def record(kind: str, results: list[dict[str, Any]], raw: list[Any] | None = None, **fields: Any) -> Record:
    """A record of a run that never was."""
    made: dict[str, Any] = {
        "command": ["tercet", "bench", kind, "--seed", "a b"],
        "date": "2026-01-02T03:04:05+00:00",
        "environment": {"commit": "0123456789abcdef", "changed files": "2"},
        "hardware": Hardware("A processor", 2, 4, ["avx2"], 2**30),
        "sources": {},
        "config": {},
        "seeds": {"prompts": 1},
        "data": {"run 0": "abc"},
        "definitions": {"figure": "what it is"},
        "raw": raw or [],
    }
    return Record(kind=kind, results=results, **(made | fields))
