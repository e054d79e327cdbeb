"""Everything that needs a CUDA device, in one run; see scripts/gpu_check.

Each section is a process of its own with a time budget, so that one that crashes the device's context, or hangs, does
not take the others along. Status: 0 all passed, 1 something failed or was not reached, 2 bad usage, 3 no CUDA device.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
EXIT_PASSED, EXIT_FAILED, EXIT_NO_DEVICE = 0, 1, 3
NO_DEVICE: Final = "no CUDA device: nothing was checked"
PACKAGES: Final = ("torch", "numpy", "triton", "msgspec")


@dataclass(frozen=True)
class Section:
    """A part of the run.

    Attributes:
        name: module and function, "module:function".
        seconds: it may take, the start of its processes included.
        shards: processes that share its work, at the same time.
    """

    name: str
    seconds: float
    shards: int = 1

    @property
    def title(self) -> str:
        """In the table."""
        return self.name.partition(":")[2]


# In order of importance. Together with START_SECONDS they fit into TOTAL_SECONDS, so that each is reached whatever the
# ones before it took. A process needs about ten seconds for its imports, its context and its first launch.
SECTIONS: Final = (
    Section("environment:environment", 20),
    Section("layers:layers", 55, shards=4),
    Section("kernels:attention", 80, shards=8),
    Section("graphs:graphs", 55, shards=2),
    Section("streams:streams", 60),
    Section("sampling:sampling", 30),
    Section("speed:model", 110),
    Section("layers:layer_speed", 25),
    Section("speed:kernel_speed", 35),
)
# For this process: its imports, and the question whether there is a device.
START_SECONDS: Final = 10.0
TOTAL_SECONDS: Final = 480.0


def main(argv: Sequence[str]) -> int:
    """Run the sections that were asked for, and print the table."""
    began = time.monotonic()
    options = _parser().parse_args(argv)
    _unpack(options.wheels)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(f"missing packages: {', '.join(missing)}; lay their wheels into {options.wheels}", file=sys.stderr)  # noqa: T201
        return EXIT_FAILED
    if options.inside:
        return _inside(options)
    if not options.dry_run_cpu and not _has_device():
        print(NO_DEVICE)  # noqa: T201
        return EXIT_NO_DEVICE
    return _run(options, began + options.seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    names = [section.title for section in SECTIONS]
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--dry-run-cpu", action="store_true", help="tiny shapes on CPU, kernels interpreted")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for the whole run (default: %(default)s)")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".whl", help="wheels of packages this Python lacks")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--shard", default="0/1", help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    return parser


def _unpack(wheels: Path) -> None:
    """Make packages importable from their wheels, which are zip files, without installing anything."""
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if not found:
        return
    folder = Path(tempfile.gettempdir()) / f"gpu_check-{os.getuid()}-{sys.version_info.major}{sys.version_info.minor}"
    for wheel in found:
        target = folder / wheel.stem
        if not target.is_dir():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
        sys.path.append(str(target))


def _has_device() -> bool:
    import torch

    return torch.cuda.is_available()


def _run(options: argparse.Namespace, end: float) -> int:
    from tests.gpu.report import read_lines, table

    wanted = [section for section in SECTIONS if not options.sections or section.title in options.sections]
    unknown = set(options.sections) - {section.title for section in SECTIONS}
    if unknown:
        _parser().error(f"no section {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        lines = Path(folder) / "lines"
        for section in wanted:
            _section(section, options, lines, end)
        found = read_lines(lines)
    failed = sum(line.verdict == "FAIL" for line in found)
    passed = sum(line.verdict == "ok" for line in found)
    print("\n" + table(found))  # noqa: T201
    print(f"{passed} passed, {failed} failed, {options.seconds - (end - time.monotonic()):.0f} s")  # noqa: T201
    return EXIT_FAILED if failed or not passed else EXIT_PASSED


def _section(section: Section, options: argparse.Namespace, lines: Path, end: float) -> None:
    """Run the section's processes; what they did not tell themselves is told for them."""
    began = time.monotonic()
    deadline = min(began + section.seconds, end)
    if deadline - began < 1:
        _tell(lines, section, "FAIL", "not reached: the time is used up")
        return
    shards = 1 if options.dry_run_cpu else section.shards
    children = [_start(section, options, lines, f"{shard}/{shards}") for shard in range(shards)]
    for child in children:
        try:
            status = child.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            _tell(lines, section, "FAIL", f"stopped after {time.monotonic() - began:.0f} s")
        else:
            if status:
                _tell(lines, section, "FAIL", f"ended with status {status}")
    _tell(lines, section, "-", f"{time.monotonic() - began:.1f} s")


def _start(section: Section, options: argparse.Namespace, lines: Path, shard: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.gpu.check", "--inside", section.name, "--shard", shard]
    command += ["--lines", str(lines), "--wheels", str(options.wheels)]
    environment = dict(os.environ)
    # Shards that each take all cores would wait for each other.
    environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // int(shard.partition("/")[2]), 1)))
    if options.dry_run_cpu:
        command.append("--dry-run-cpu")
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def _tell(lines: Path, section: Section, verdict: str, text: str) -> None:
    from tests.gpu.report import Report, device_of

    report = Report(section.title, lines, device_of(dry=True), dry=False)
    if verdict == "FAIL":
        report.check("section", False, text)
    else:
        report.note("section", text)


def _inside(options: argparse.Namespace) -> int:
    """Be the process of one section."""
    from tests.gpu.report import Report, device_of

    module, _, function = options.inside.partition(":")
    shard, shards = (int(part) for part in options.shard.split("/"))
    report = Report(function, options.lines, device_of(dry=options.dry_run_cpu), dry=options.dry_run_cpu)
    section = getattr(importlib.import_module(f"tests.gpu.{module}"), function)
    try:
        if options.dry_run_cpu:
            from tests.model_executor import interpreted  # noqa: F401 - it rounds as a device does
        section(report, shard, shards)
    except Exception as error:  # noqa: BLE001 - whatever it was is reported, and the run goes on
        traceback.print_exc()
        report.check("section", False, f"{type(error).__name__}: {str(error).splitlines()[:1]}")
    return EXIT_PASSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
