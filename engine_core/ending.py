"""How an engine core ends: what clients are told, whether another core may follow, and the exit status."""

from __future__ import annotations

from typing import Final

from engine_core.wire.client import Fatal

EXIT_CLEAN: Final = 0
EXIT_START_REFUSED: Final = 3
EXIT_FAILED: Final = 4

# Endings after which another core would end in the same way, or executors were replaced often enough.
FINAL_CODES: Final = ("start_refused", "protocol", "executor_died", "stalled")


def exit_status(ending: Fatal) -> int:
    """The exit status of the process for what clients were told at its end."""
    match ending.code:
        case "shutdown":
            return EXIT_CLEAN
        case "start_refused" | "protocol":
            return EXIT_START_REFUSED
        case _:
            return EXIT_FAILED


def is_final(ending: Fatal, *, replaceable: bool, replacement_failed: bool) -> bool:
    """Whether no other core follows, as far as this one knows; its owner has the last word.

    Args:
        ending: why it ends.
        replaceable: False when lost processes are not replaced at all, or the owner itself ends.
        replacement_failed: this core took the place of another one, and was never ready.
    """
    return not replaceable or (ending.code in FINAL_CODES and not replacement_failed)
