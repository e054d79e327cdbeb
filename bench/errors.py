"""The error tree of bench."""

from __future__ import annotations


class BenchError(Exception):
    """A benchmark that gives no figure; the message is one line for the user.

    Attributes:
        exit_code: of the command that it ends.
    """

    exit_code = 4


class UsageError(BenchError):
    """A flag, a value or a file is wrong."""

    exit_code = 2


class LoadFailed(BenchError):
    """No request of a load was answered."""


class CommandFailed(BenchError):
    """A command that was to be measured failed, or its output has not the figure."""


class RecordInvalid(BenchError):
    """A file is no run record."""

    exit_code = 2
