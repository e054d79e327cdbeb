"""How often a lost process may be replaced: so many times within a moving window."""

from __future__ import annotations

from collections import deque

from engine_core.wire.config import RESTART_WINDOW_S


class RestartBudget:
    """Counts replacements.

    Args:
        limit: replacements within `window_s`; 0: none at all.
        window_s: length of the window, in seconds.
    """

    def __init__(self, limit: int, window_s: float = RESTART_WINDOW_S) -> None:
        self.limit = limit
        self.window_s = window_s
        self._taken: deque[float] = deque()

    def take(self, now: float) -> bool:
        """Count one more replacement at `now` (monotonic seconds); False, and nothing counted, when none is left."""
        if self.used(now) >= self.limit:
            return False
        self._taken.append(now)
        return True

    def give_back(self, count: int) -> None:
        """The latest `count` replacements count no more."""
        for _ in range(min(count, len(self._taken))):
            self._taken.pop()

    def used(self, now: float) -> int:
        """Replacements within the window that ends at `now`."""
        while self._taken and now - self._taken[0] > self.window_s:
            self._taken.popleft()
        return len(self._taken)

    def spent(self) -> str:
        """What to say when none is left."""
        if self.limit == 0:
            return "--max-restarts is 0"
        return f"{self.limit} restarts in {self.window_s / 60:g} minutes are used up (--max-restarts)"
