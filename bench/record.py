"""A run record: a result with all that is needed to judge it and to repeat it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from bench.errors import RecordInvalid, UsageError
from bench.sources import source_digests
from frontend.proof.surroundings import surroundings

# What decides how fast a processor computes.
FLAGS: Final = ("avx2", "f16c", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8")
CPU_INFO: Final = Path("/proc/cpuinfo")


class Hardware(Struct, frozen=True):
    """The machine.

    Attributes:
        processor: its model, as the system names it.
        cores: that this process may use; machine_cores: all there are.
        flags: those of FLAGS that it has.
        memory: bytes.
    """

    processor: str
    cores: int
    machine_cores: int
    flags: list[str]
    memory: int


class Record(Struct, frozen=True, kw_only=True):
    """A result with its evidence.

    Attributes:
        kind: the benchmark.
        command: that repeats it.
        date: UTC, ISO 8601.
        environment: versions, commit, number of changed files ("changed files"), digest of the lock.
        hardware: the machine.
        sources: digest of each file of the product, see sources.
        kernels: what the server's /reports/kernels said; None: no server, or another product's.
        config: what was asked for.
        seeds: by what they are for.
        data: digest or name of each input.
        definitions: of the figures.
        results: figures of each run.
        raw: samples of each run.
    """

    version: int = 1
    kind: str
    command: list[str]
    date: str
    environment: dict[str, str]
    hardware: Hardware
    sources: dict[str, str]
    kernels: Any = None
    config: dict[str, Any]
    seeds: dict[str, int]
    data: dict[str, str]
    definitions: dict[str, str]
    results: list[dict[str, Any]]
    raw: list[Any]


def hardware() -> Hardware:
    """The machine this runs on."""
    text = CPU_INFO.read_text(encoding="utf-8") if CPU_INFO.is_file() else ""
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    known = set(found.get("flags", "").split())
    return Hardware(
        processor=found.get("model name", platform.machine()),
        cores=len(os.sched_getaffinity(0)),
        machine_cores=os.cpu_count() or 1,
        flags=[flag for flag in FLAGS if flag in known],
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def make_record(
    kind: str,
    command: Sequence[str],
    results: Sequence[Mapping[str, object]],
    *,
    raw: Sequence[object] = (),
    kernels: object = None,
    config: Mapping[str, object] | None = None,
    seeds: Mapping[str, int] | None = None,
    data: Mapping[str, str] | None = None,
    definitions: Mapping[str, str] | None = None,
) -> Record:
    """A record of now and here."""
    return Record(
        kind=kind,
        command=list(command),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=surroundings(None),
        hardware=hardware(),
        sources=source_digests(),
        kernels=kernels,
        config=dict(config or {}),
        seeds=dict(seeds or {}),
        data=dict(data or {}),
        definitions=dict(definitions or {}),
        results=[dict(result) for result in results],
        raw=list(raw),
    )


def write_record(record: Record, path: Path) -> None:
    """Write a record as JSON.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_lines(record))
    except OSError as error:
        raise UsageError(f"--result-file {path}: {error.strerror}") from error


def _lines(record: Record) -> bytes:
    """JSON with a line for each field, and for each result: small, and differences can be read."""
    fields = {name: msgspec.json.encode(getattr(record, name)) for name in Record.__struct_fields__}
    results = b",\n  ".join(map(msgspec.json.encode, record.results))
    fields["results"] = b"[\n  %b\n ]" % results if results else b"[]"
    return b"{\n" + b",\n".join(b' "%b": %b' % (name.encode(), text) for name, text in fields.items()) + b"\n}\n"


def read_record(path: Path) -> Record:
    """Read what write_record wrote.

    Raises:
        RecordInvalid: there is no such file, or it holds something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RecordInvalid(f"{path}: {error}") from error
