"""What one customer may have open here at once. Pure; counts are this gateway's alone."""

from collections import Counter

MAX_BODY_BYTES = 4 << 20


class InFlight:
    """Open requests by customer. Every `enter` that returned True is followed by one `leave`."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    def enter(self, customer: str, limit: int) -> bool:
        """Whether the customer may open one more."""
        if self._open[customer] >= limit:
            return False
        self._open[customer] += 1
        return True

    def leave(self, customer: str) -> None:
        self._open[customer] -= 1
        if self._open[customer] <= 0:
            del self._open[customer]

    def open(self, customer: str) -> int:
        return self._open.get(customer, 0)
