"""The compiled library: found, loaded, and its functions and structs as C declares them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_long, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

from model_executor.errors import NativeUnavailable
from model_executor.huge_pages import Arena

FOLDER: Final = Path(__file__).parent
CPUINFO: Final = Path("/proc/cpuinfo")

# Builds of the same sources, the best first, and the processor flags that each needs.
BUILDS: Final[Mapping[str, frozenset[str]]] = {
    "_avx512_vnni": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma", "f16c"}),
    "_avx2": frozenset({"avx2", "fma", "f16c"}),
    "_baseline": frozenset(),
}


class LinearStruct(Structure):
    """Linear of linear.h."""

    _fields_ = (
        ("inputs", c_long),
        ("outputs", c_long),
        ("kind", c_long),
        ("finish", c_long),
        ("panels", c_void_p),
        ("bias", c_void_p),
    )


class AttentionStruct(Structure):
    """Attention of attention.h."""

    _fields_ = (
        ("heads", c_long),
        ("kv_heads", c_long),
        ("head_dim", c_long),
        ("block_size", c_long),
        ("kind", c_long),
        ("window", c_long),
        ("scale", c_float),
        ("soft_cap", c_float),
    )


class StepStruct(Structure):
    """Step of attention.h."""

    _fields_ = (
        ("query", c_void_p),
        ("query_stride", c_long),
        ("out", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("rows", c_long),
        ("query_start", c_void_p),
        ("contexts", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_long),
    )


class NormStruct(Structure):
    """Norm of rows.h."""

    _fields_ = (
        ("x", c_void_p),
        ("add", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("rows", c_long),
        ("width", c_long),
        ("offset", c_float),
        ("eps", c_float),
    )


class HeadsStruct(Structure):
    """Heads of rows.h."""

    _fields_ = (
        ("projected", c_void_p),
        ("stride", c_long),
        ("tokens", c_long),
        ("heads", c_long),
        ("kv_heads", c_long),
        ("head_dim", c_long),
        ("turned", c_long),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("positions", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("norm_offset", c_float),
        ("norm_eps", c_float),
        ("key", c_void_p),
        ("value", c_void_p),
        ("block_size", c_long),
        ("kind", c_long),
        ("slots", c_void_p),
    )


class EmbedStruct(Structure):
    """Embed of rows.h."""

    _fields_ = (
        ("table", c_void_p),
        ("places", c_void_p),
        ("out", c_void_p),
        ("rows", c_long),
        ("width", c_long),
        ("scale", c_float),
    )


class GroupStruct(Structure):
    """Group of program.c."""

    _fields_ = (("slots", c_void_p), ("tables", c_void_p), ("table_stride", c_long))


class InputsStruct(Structure):
    """Inputs of program.c."""

    _fields_ = (
        ("tokens", c_long),
        ("rows", c_long),
        ("samples", c_long),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("query_start", c_void_p),
        ("contexts", c_void_p),
        ("sample_index", c_void_p),
        ("groups", c_void_p),
    )


class OperationStruct(Structure):
    """Operation of program.c."""

    _fields_ = (
        ("what", c_long),
        ("group", c_long),
        ("kernel", c_void_p),
        ("step", c_void_p),
        ("in_", c_void_p),
        ("out", c_void_p),
        ("in_stride", c_long),
        ("out_stride", c_long),
    )


class Native:
    """The library with a pool of threads, which live as long as the process. One thread at a time may call it.

    Args:
        path: of the library.
        threads: that compute, the caller included; at least 1.

    Attributes:
        name: of the build.
        memory: for what the kernels keep.

    Raises:
        NativeUnavailable: it cannot be loaded, or the system gives no threads.
    """

    def __init__(self, path: Path, threads: int) -> None:
        self.memory = Arena()
        self.name = path.name.split(".")[0].removeprefix("_")
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailable("native library", path.name, str(error)) from error
        self._declare()
        self._pool = self._library.pool_new(threads)
        if not self._pool:
            raise NativeUnavailable("threads of the native library", threads, "the system gives none")

    def _declare(self) -> None:
        library, pointer = self._library, c_void_p
        signatures: Mapping[str, tuple[object, Sequence[object]]] = {
            "pool_new": (pointer, (c_int,)),
            "linear_run": (c_int, (pointer, POINTER(LinearStruct), pointer, c_long, c_long, pointer, c_long)),
            "linear_pack": (c_int, (pointer, POINTER(LinearStruct), pointer, c_long, c_long)),
            "linear_int8_bytes": (c_long, (c_long, c_long)),
            "linear_narrowest": (c_int, (pointer, c_long)),
            "attention_run": (c_int, (pointer, POINTER(AttentionStruct), POINTER(StepStruct))),
            "norm_run": (None, (pointer, POINTER(NormStruct))),
            "heads_run": (None, (pointer, POINTER(HeadsStruct))),
            "program_run": (c_int, (pointer, pointer, c_long, POINTER(InputsStruct))),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments

    def linear(self, linear: LinearStruct, x: int, x_stride: int, rows: int, out: int, out_stride: int) -> None:
        """x [rows, inputs] by a packed weight; addresses and strides in floats.

        Raises:
            MemoryError: there is no room for the packed rows.
        """
        if self._library.linear_run(self._pool, linear, x, x_stride, rows, out, out_stride):
            raise MemoryError(f"no room to pack {rows} rows")

    def pack(self, linear: LinearStruct, weight: int, row_stride: int, column_stride: int) -> None:
        """Fill linear.panels from a float32 weight with the given strides of (in, out).

        Raises:
            MemoryError: there is no room for a panel's columns.
        """
        if self._library.linear_pack(self._pool, linear, weight, row_stride, column_stride):
            raise MemoryError(f"no room to pack {linear.inputs} inputs")

    def int8_bytes(self, inputs: int, outputs: int) -> int:
        """Bytes of the panels of an int8 weight."""
        size: int = self._library.linear_int8_bytes(inputs, outputs)
        return size

    def narrowest(self, x: int, count: int) -> int:
        """The narrowest kind of linear.h that holds `count` floats at x exactly."""
        kind: int = self._library.linear_narrowest(x, count)
        return kind

    def attention(self, attention: AttentionStruct, step: StepStruct) -> None:
        """See attention_run.

        Raises:
            MemoryError: there is no room for its state.
        """
        if self._library.attention_run(self._pool, attention, step):
            raise MemoryError(f"no room for the attention of {step.rows} rows")

    def norm(self, norm: NormStruct) -> None:
        """See norm_run."""
        self._library.norm_run(self._pool, norm)

    def heads(self, heads: HeadsStruct) -> None:
        """See heads_run."""
        self._library.heads_run(self._pool, heads)

    def program(self, operations: ctypes.Array[OperationStruct], inputs: InputsStruct) -> None:
        """See program_run.

        Raises:
            MemoryError: there is no room for an operator's state.
        """
        if self._library.program_run(self._pool, operations, len(operations), inputs):
            raise MemoryError(f"no room for a step of {inputs.tokens} tokens")


def find_library(folder: Path = FOLDER, cpuinfo: Path = CPUINFO) -> Path:
    """The best build that this processor can run.

    Raises:
        NativeUnavailable: the package was built without a C compiler.
    """
    flags = processor_flags(cpuinfo)
    for name, needed in BUILDS.items():
        for path in build_files(folder, name):
            if needed <= flags:
                return path
    raise NativeUnavailable("native library", "none", "the package was built without a C compiler")


def build_files(folder: Path, name: str) -> Iterator[Path]:
    """The file of a build, if the package was installed with it."""
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"{name}{suffix}"
        if path.exists():
            yield path


def processor_flags(cpuinfo: Path) -> frozenset[str]:
    """What the processor can; nothing where the kernel does not say it in this form."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, rest = line.partition(":")
        if name.strip() == "flags":
            return frozenset(rest.split())
    return frozenset()


def load_native(threads: int) -> Native:
    """The library of this machine.

    Raises:
        NativeUnavailable: there is none.
    """
    return Native(find_library(), threads)
