from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from model_executor.errors import NativeUnavailable
from model_executor.native.library import Native, find_library, load_native
from tests.model_executor.native.builds import builds

SUFFIX = EXTENSION_SUFFIXES[0]
AVX2 = "flags\t\t: fpu avx2 fma f16c\n"
AVX512 = "flags\t\t: avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni\n"


def place(folder: Path, *names: str) -> None:
    for name in names:
        (folder / f"{name}{SUFFIX}").touch()


@pytest.mark.parametrize(
    ("cpuinfo", "there", "chosen"),
    [
        (AVX512, ("_avx512_vnni", "_avx2", "_baseline"), "_avx512_vnni"),
        (AVX512, ("_avx2", "_baseline"), "_avx2"),
        (AVX2, ("_avx512_vnni", "_avx2", "_baseline"), "_avx2"),
        ("Features\t: fp asimd\n", ("_avx2", "_baseline"), "_baseline"),
    ],
)
def test_the_best_build_that_the_processor_can_run(
    tmp_path: Path, cpuinfo: str, there: tuple[str, ...], chosen: str
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    place(tmp_path, *there)
    assert find_library(tmp_path, tmp_path / "cpuinfo").name == f"{chosen}{SUFFIX}"


def test_without_a_build_it_says_why(tmp_path: Path) -> None:
    place(tmp_path, "_avx2")
    with pytest.raises(NativeUnavailable, match="without a C compiler"):
        find_library(tmp_path, tmp_path / "no such file")


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    broken = tmp_path / f"_baseline{SUFFIX}"
    broken.write_bytes(b"no library")
    with pytest.raises(NativeUnavailable, match=broken.name.split(".")[0]):
        Native(broken, 1)


def test_this_machine_has_one() -> None:
    """The tests of kernels would be empty without; a compiler is part of the development setup."""
    assert builds()
    assert load_native(1).name == builds()[0].name
