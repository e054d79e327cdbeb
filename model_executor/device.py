"""The device a step runs on: which one, in which dtype, with how many threads, and how much memory is free."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from engine_core.wire.config import ExecutorOptions
from model_executor.errors import DeviceUnavailable

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}


def resolve_device(options: ExecutorOptions) -> torch.device:
    """The device that the options ask for; "auto" is CUDA where there is a device.

    Raises:
        DeviceUnavailable: CUDA is asked for and there is none.
    """
    if options.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if options.device == "cuda":
        built = "no CUDA device is visible" if torch.version.cuda else "this torch is built without CUDA"
        raise DeviceUnavailable("device", "cuda", built)
    return torch.device("cpu")


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a dtype that the device can store but not compute in.

    Raises:
        DeviceUnavailable: bfloat16 on a CUDA device before Ampere.
    """
    if (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise DeviceUnavailable(
            "dtype", "bfloat16", f"{torch.cuda.get_device_name(device)} cannot; float16 can be used"
        )


def describe(device: torch.device) -> str:
    """Name of the device, for reports."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def thread_count(threads: int | None) -> int:
    """How many threads compute; None: one for each core this process may run on."""
    return threads or len(os.sched_getaffinity(0))


def use_threads(threads: int | None) -> int:
    """Set how many threads torch computes with; see thread_count."""
    count = thread_count(threads)
    torch.set_num_threads(count)
    return count


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, complete once all work queued until now is done; a tensor on CPU is given as it is."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def free_memory(device: torch.device) -> int:
    """Bytes that can be had now: of the device, or of the machine within this process's control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(machine_free(Path("/proc/meminfo")), group_free(Path("/sys/fs/cgroup")))


def machine_free(meminfo: Path) -> int:
    """What the kernel takes for available without swapping; meminfo is the file of that name."""
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def group_free(root: Path) -> int:
    """What the control group leaves, counting its page cache as free; a large number without a limit."""
    unlimited = 2**63 - 1
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except OSError:
        return unlimited
    if limit == "max":
        return unlimited
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0)))
