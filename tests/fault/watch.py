"""When a fault was first seen from outside, and when all was well again."""

from __future__ import annotations

import threading
import time

import httpx

from tests.fault.rig import Rig


class Watch:
    """Looks at health and process ids all the time, from the fault on.

    Attributes:
        detected, recovered: moments of the first sign of trouble, and of the latest return to health after it.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._url = rig.url
        self._pids = rig.pids()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.began = time.monotonic()
        self.detected: float | None = None
        self.recovered: float | None = None
        self._thread.start()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, trust_env=False, verify=False, timeout=10.0) as http:
            while not self._done.wait(0.02):
                try:
                    well = http.get("/health").status_code == 200
                except httpx.TransportError:
                    well = False
                now = time.monotonic()
                if self.detected is None and (not well or self._rig.pids() != self._pids):
                    self.detected = now
                if self.detected is not None and not well:
                    self.recovered = None
                elif self.detected is not None and self.recovered is None:
                    self.recovered = now

    def stop(self) -> None:
        """Look no more."""
        self._done.set()
        self._thread.join(15.0)
