"""Which request kills executors.

The suspects of a death are the requests of the oldest plan that was out: an executor runs its plans one after the
other. A death counts against each of them until it comes further than it was at that death.

    A death of the executor's own (an error, a crash, a hang, a wrong result) puts its suspects on trial: each then runs
    alone until it comes further than it was. Only the second one in a row from outside (a kill, a stop) does so, for
    most requests that meet one are innocent.

    A request that was the only suspect, and has two own deaths or three deaths of any kind against it, is the culprit.
    The restarts that it cost are given back to the budget: one bad request cannot use it up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from msgspec import Struct

from engine_core.sequence import RequestKey

OWN_DEATHS: Final = 2
ANY_DEATHS: Final = 3
# Deaths from outside that put a request on trial.
OUTSIDE_DEATHS: Final = 2


class Verdict(Struct, frozen=True):
    """What follows from a death.

    Attributes:
        culprit: the request that is to fail; deaths: those that it caused.
        trial: requests to be run alone, most suspicious first; none when a culprit explains the death.
    """

    culprit: RequestKey | None
    deaths: int
    trial: list[RequestKey]


class _Record(Struct):
    """Deaths against one request since it last came further than `peak` tokens."""

    peak: int
    own: int = 0
    outside: int = 0

    @property
    def deaths(self) -> int:
        return self.own + self.outside


class Blame:
    """The records of all suspects."""

    def __init__(self) -> None:
        self._records: dict[RequestKey, _Record] = {}

    def died(self, suspects: Mapping[RequestKey, int], live: Collection[RequestKey], *, outside: bool) -> Verdict:
        """An executor is lost.

        Args:
            suspects: requests of the oldest plan out, with the tokens of each that had been computed for good.
            live: all requests; the others are forgotten.
            outside: whether a signal or a stop from outside was the cause.
        """
        self._records = {key: record for key, record in self._records.items() if key in live}
        for key, peak in suspects.items():
            record = self._records.get(key)
            if record is None or peak > record.peak:
                record = self._records[key] = _Record(peak)
            record.own += not outside
            record.outside += outside
        if len(suspects) == 1:
            (key,) = suspects
            record = self._records[key]
            if record.own >= OWN_DEATHS or record.deaths >= ANY_DEATHS:
                del self._records[key]
                return Verdict(culprit=key, deaths=record.deaths, trial=[])
        trial = [key for key in suspects if self._suspicious(key)]
        trial.sort(key=lambda key: -self._records[key].deaths)
        return Verdict(culprit=None, deaths=0, trial=trial)

    def _suspicious(self, key: RequestKey) -> bool:
        record = self._records[key]
        return record.own > 0 or record.outside >= OUTSIDE_DEATHS
