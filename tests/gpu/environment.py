"""What the run stands on."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from tests.gpu.report import Report


def environment(report: Report, shard: int, shards: int) -> None:
    """Versions and the device."""
    names = ("torch", "triton", "numpy", "msgspec")
    versions = [f"{name} {_version(name)}" for name in names]
    report.note("software", f"Python {platform.python_version()}, {', '.join(versions)}, CUDA {torch.version.cuda}")
    if report.device.type == "cuda":
        found = torch.cuda.get_device_properties(report.device)
        memory = f"{found.total_memory / 2**30:.0f} GiB"
        report.note("device", f"{found.name}, {memory}, {found.multi_processor_count} processors")
        report.note("capability", f"{found.major}.{found.minor}, free {torch.cuda.mem_get_info()[0] / 2**30:.0f} GiB")
    else:
        report.note("device", "cpu: a dry run, which says nothing about a GPU")
    ones = torch.ones(8, device=report.device).sum().item()
    report.check("the device adds", ones == 8.0, f"{ones:g}")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "?"
