"""`python -m tests.fault --out FILE [--only TEXT]`: run the fault matrix, print its table, keep the records as JSON."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import msgspec

from tests.fault.case import all_cases
from tests.fault.matrix import run_case
from tests.fault.record import Record, table
from tests.fixtures.chain import write_chain


def main() -> int:
    """Run; 0 when every case is as it must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.fault", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the records go, as JSON; beside it the table")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    options = parser.parse_args()
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="fault-model-") as folder:
        model = write_chain(Path(folder) / "chain")
        for case in all_cases():
            if options.only not in case.name:
                continue
            records.append(run_case(case, model))
            sys.stdout.write(f"{records[-1].case}: {'ok' if records[-1].ok else records[-1].faults}\n")
            sys.stdout.flush()
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(records)))
    options.out.with_suffix(".md").write_text(table(records) + "\n", encoding="utf-8")
    sys.stdout.write(table(records) + "\n")
    return 0 if all(record.ok for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
