"""The answers that are being made: counted, and cut when the server must end."""

from __future__ import annotations

import asyncio
from typing import Any

from frontend.errors import FrontendError


class Cuttable:
    """One answer's task, which can be ended with a reason."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.reason: FrontendError | None = None

    def cut(self, reason: FrontendError) -> None:
        """Cancel the task; whoever awaits it finds `reason`. The first reason stays."""
        if self.reason is None and not self._task.done():
            self.reason = reason
            self._task.cancel()


class Running:
    """All answers that are being made."""

    def __init__(self) -> None:
        self._answers: set[Cuttable] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._answers)

    def enter(self, task: asyncio.Task[Any]) -> Cuttable:
        """An answer begins."""
        answer = Cuttable(task)
        self._answers.add(answer)
        self._idle.clear()
        return answer

    def leave(self, answer: Cuttable) -> None:
        """An answer has ended, whichever way."""
        self._answers.discard(answer)
        if not self._answers:
            self._idle.set()

    def cut(self, reason: FrontendError) -> int:
        """End all of them; gives how many there were."""
        for answer in tuple(self._answers):
            answer.cut(reason)
        return len(self._answers)

    async def wait_idle(self, seconds: float) -> bool:
        """Wait until none is left, at most `seconds`; whether none is."""
        try:
            async with asyncio.timeout(seconds):
                # An answer may begin in the moment in which the last one ends.
                while self._answers:
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True
