"""A process below this one: started so that it cannot outlive its parent, watched, and ended within a deadline.

Two ties bind a child to its parent, because each has a gap: PR_SET_PDEATHSIG misses a parent that died before the call,
and end-of-file on the inherited pipe is not read by a process that is stuck in native code without the interpreter.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final

PARENT_FD_FLAG: Final = "--parent-fd"
PR_SET_PDEATHSIG: Final = 1
EXIT_ORPHANED: Final = 75
KILL_WAIT_S: Final = 10.0


class Child:
    """A running child.

    Attributes:
        name: for errors and logs.
        pid: its process id.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], lifeline: int) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._lifeline = lifeline
        self._sentinel = os.pidfd_open(process.pid)

    @classmethod
    def spawn(cls, name: str, arguments: Sequence[str]) -> Child:
        """Start `python ARGUMENTS --parent-fd N`. Call it from the main thread: the death signal follows the thread.

        The child leads a process group of its own, so that a terminal's Ctrl-C reaches the top process only.
        """
        child_end, lifeline = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, *arguments, PARENT_FD_FLAG, str(child_end)],
                stdin=subprocess.DEVNULL,
                pass_fds=[child_end],
                process_group=0,
            )
        except OSError:
            os.close(lifeline)
            raise
        finally:
            os.close(child_end)
        return cls(name, process, lifeline)

    def fileno(self) -> int:
        """A descriptor that turns readable when the child ends."""
        return self._sentinel

    def status(self) -> int | None:
        """Exit status (negative: the signal that ended it), None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens when the child has ended."""
        if self.status() is None:
            self._process.send_signal(number)

    def wait(self, seconds: float) -> int | None:
        """Wait for the end, at most `seconds`; the exit status, or None."""
        if (status := self.status()) is not None:
            return status
        deadline = time.monotonic() + seconds
        # poll, for select takes no descriptor above 1023.
        poll = select.poll()
        poll.register(self._sentinel, select.POLLIN)
        while self.status() is None:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                return self.status()
        return self.status()

    def end(self, grace_s: float) -> int:
        """End the child: SIGTERM, and SIGKILL when `grace_s` have passed. Gives its exit status."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        status = self.wait(grace_s)
        if status is None:
            self.signal(signal.SIGKILL)
            # Stuck in a driver it may outlast even this; the kernel ends it when it comes back.
            status = self.wait(KILL_WAIT_S)
        self.close()
        return -signal.SIGKILL if status is None else status

    def close(self) -> None:
        """Let go of the descriptors; a child that still runs sees its lifeline end and dies."""
        for descriptor in (self._lifeline, self._sentinel):
            if descriptor >= 0:
                os.close(descriptor)
        self._lifeline = self._sentinel = -1


def ending(status: int) -> str:
    """How a process ended, by its exit status; negative is the signal that ended it."""
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def bind_to_parent(parent_fd: int) -> None:
    """In a child, before anything slow: die when the parent dies.

    Args:
        parent_fd: the inherited end of the pipe that the parent holds open.

    Raises:
        OSError: parent_fd is no open descriptor, or the kernel has no death signal.
    """
    os.fstat(parent_fd)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    threading.Thread(target=_watch, args=(parent_fd,), name="lifeline", daemon=True).start()


def _watch(parent_fd: int) -> None:
    try:
        while os.read(parent_fd, 1):
            pass
    finally:
        os._exit(EXIT_ORPHANED)
