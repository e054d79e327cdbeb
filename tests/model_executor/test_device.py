from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_core.wire.config import ExecutorOptions
from model_executor import device
from model_executor.errors import DeviceUnavailable


def test_cpu_is_what_it_says() -> None:
    assert device.resolve_device(ExecutorOptions(device="cpu")) == torch.device("cpu")
    assert device.describe(torch.device("cpu")) == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda() -> None:
    assert device.resolve_device(ExecutorOptions()).type == "cpu"
    with pytest.raises(DeviceUnavailable, match="device: cuda: "):
        device.resolve_device(ExecutorOptions(device="cuda"))


@pytest.mark.parametrize("dtype", list(device.DTYPES.values()))
def test_every_dtype_computes_on_cpu(dtype: torch.dtype) -> None:
    device.check_dtype(dtype, torch.device("cpu"))
    product = torch.ones(3, 64, dtype=dtype) @ torch.full((64, 2), 0.5, dtype=dtype)
    assert product.tolist() == [[32.0, 32.0]] * 3


def test_free_memory_is_the_smaller_of_machine_and_group() -> None:
    free = device.free_memory(torch.device("cpu"))
    assert 2**20 < free < 2**50


def test_memory_of_a_control_group(tmp_path: Path) -> None:
    assert device.group_free(tmp_path) == 2**63 - 1
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 250\nactive_file 100\n")
    assert device.group_free(tmp_path) == 650
    (tmp_path / "memory.max").write_text("max\n")
    assert device.group_free(tmp_path) == 2**63 - 1


def test_memory_of_the_machine(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24000 kB\nMemFree:  1 kB\nMemAvailable:   12 kB\n")
    assert device.machine_free(meminfo) == 12 * 1024


def test_threads() -> None:
    before = torch.get_num_threads()
    try:
        assert device.use_threads(1) == torch.get_num_threads() == 1
        assert device.use_threads(None) >= 1
    finally:
        torch.set_num_threads(before)
