"""What one customer may have open here at once. Pure; counts are this gateway's alone."""

from collections import Counter
from types import TracebackType
from typing import Self

from gateway.errors import ApiError

MAX_BODY_BYTES = 4 << 20


class InFlight:
    """Open outputs by customer."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    def places(self, customer: str, limit: int) -> "Places":
        return Places(self._open, customer, limit)

    def open(self, customer: str) -> int:
        return self._open.get(customer, 0)


class Places:
    """One request's places among its customer's, of which there are `limit`: one from the start, given back at the end.

    Raises ApiError (429) where there are not so many.
    """

    def __init__(self, taken: Counter[str], customer: str, limit: int) -> None:
        self._taken, self._customer, self._limit = taken, customer, limit
        self._mine = 0

    def take(self, count: int) -> None:
        """So many more, or none."""
        if self._taken[self._customer] + count > self._limit:
            others = self._taken[self._customer] - self._mine
            raise ApiError(
                "too_many_in_flight",
                f"{self._limit} outputs of this customer may be open at once: {others} are, and this request "
                f"asks for {self._mine + count}",
            )
        self._taken[self._customer] += count
        self._mine += count

    def __enter__(self) -> Self:
        self.take(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._taken[self._customer] -= self._mine
        if self._taken[self._customer] <= 0:
            del self._taken[self._customer]
