"""How far a long loop is, every ten seconds in the log."""

from time import monotonic

from loguru import logger

INTERVAL_S = 10.0


class Progress:
    """Reports `what` of `total` items; the rate is that of the whole loop so far."""

    def __init__(self, what: str, total: int):
        self.what = what
        self.total = total
        self.done = 0
        self.started = self.reported = monotonic()

    def add(self, count: int) -> None:
        self.done += count
        now = monotonic()
        if now - self.reported >= INTERVAL_S or self.done == self.total:
            self.reported = now
            rate = self.done / max(now - self.started, 1e-6)
            left = (self.total - self.done) / rate
            logger.info(f"{self.what}: {self.done} of {self.total}, {rate:.1f} per second, {left:.0f} s left")
