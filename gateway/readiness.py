"""Whether this gateway can take a chat, and if not, why. Pure.

The steps of its start (tables, place), the broker's silence, and its own stop; a live replica is not among them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import ApiError


@dataclass
class Readiness:
    """`hearing`: whether both readers, of tokens and of tables, hear Kafka."""

    hearing: Callable[[], bool]
    tables: bool = False
    claimed: bool = False
    stopping: bool = False

    @property
    def deaf(self) -> bool:
        """Whether nothing is missing but the broker's word."""
        return self.claimed and not self.stopping and not self.hearing()

    def why_not(self) -> ApiError | None:
        if self.stopping:
            return ApiError("stopping", "this gateway is shutting down")
        if not self.tables:
            return ApiError("starting", "this gateway is reading its tables")
        if not self.claimed:
            return ApiError("starting", "this gateway is waiting for its place")
        if not self.hearing():
            return ApiError("broker", "the broker does not answer")
        return None

    def check(self) -> None:
        """What a chat or a command needs. Raises ApiError."""
        if (problem := self.why_not()) is not None:
            raise problem

    def check_tables(self) -> None:
        """What reading needs: the tables go on serving while the broker is away. Raises ApiError."""
        if not self.tables:
            raise ApiError("starting", "this gateway is reading its tables")
