"""Puts one request's tokens in order by absolute output position. Pure.

Below the next position it trims (a duplicate), above it there is a gap: something was lost, and only a new attempt that
starts at the next position can mend it. What it returned was delivered; it never takes anything back.
"""

from dataclasses import dataclass, field


class Gap(Exception):
    """Tokens arrived beyond the next position."""


@dataclass
class Sequencer:
    """`ids` is the output so far, over all attempts."""

    ids: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        return len(self.ids)

    def place(self, position: int, ids: list[int]) -> list[int]:
        """The part of `ids` (standing at `position`, ...) that is new. Raises Gap, having changed nothing."""
        if position > len(self.ids):
            raise Gap(f"position {position} after {len(self.ids)} tokens")
        fresh = ids[len(self.ids) - position :]
        self.ids.extend(fresh)
        return fresh
