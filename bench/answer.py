"""What a client saw of one request."""

from __future__ import annotations

from msgspec import Struct


class Answer(Struct):
    """One request; times are seconds of one monotonic clock.

    Attributes:
        due: when it was to be sent; sent: when it was; ended: when the answer was whole.
        arrivals: of each event that carried a part of the answer.
        input_tokens, output_tokens: as the server counted them; without its counts, tokens asked for and events.
        error: why it failed; empty: it did not.
    """

    due: float = 0.0
    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = []
    input_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first part of the answer."""
        return self.arrivals[0] - self.sent if self.arrivals else 0.0

    @property
    def e2el(self) -> float:
        """Seconds from sending to the last part of the answer."""
        return self.arrivals[-1] - self.sent if self.arrivals else 0.0

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None: there was one token at most."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring parts of the answer."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]
