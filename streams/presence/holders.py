"""The reader's view of a table of claims and beats: who holds each place, and is it alive. Pure.

Ordering relied on: the table has one partition, so that all readers see claims and beats in one order. A claim's offset
is its incarnation; whatever carries a lower one is a ghost. Records replayed at start prove nothing: a holder counts as
unheard until a live record of it arrives, and as alive (towards someone who wants its place) until it has been silent
for DEAD_S of listening.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

SUSPECT_S = 3.0
DEAD_S = 5.0

Beat = TypeVar("Beat")


@dataclass(frozen=True)
class Lost:
    """One incarnation that will answer no more, once per silence. `word`: its own last word, if any."""

    place: int
    incarnation: int
    why: str  # replaced | gone | silent
    word: str = ""


@dataclass
class Holder(Generic[Beat]):
    """`heard_at` is listening time; `live` turns true with the first record that was not replayed."""

    place: int
    incarnation: int
    start_offset: int
    heard_at: float
    beat: Beat | None = None
    live: bool = False
    gone: bool = False
    lost: bool = False


class Holders(Generic[Beat]):
    """All places of one table. `now` is listening time (ListeningClock) everywhere."""

    def __init__(self) -> None:
        self._holders: dict[int, Holder[Beat]] = {}

    def claimed(self, place: int, offset: int, start_offset: int, live: bool, now: float) -> list[Lost]:
        """A claim record at `offset`."""
        return self._heard(place, offset, start_offset, None, live, now)

    def beaten(
        self,
        place: int,
        incarnation: int,
        start_offset: int,
        beat: Beat,
        live: bool,
        now: float,
        gone: str | None = None,
    ) -> list[Lost]:
        """A beat record; `gone` is the holder's last word when this beat is its last."""
        lost = self._heard(place, incarnation, start_offset, beat, live, now)
        holder = self._holders[place]
        if gone is not None and holder.incarnation == incarnation and not holder.gone:
            holder.gone = True
            if not holder.lost:
                holder.lost = True
                lost.append(Lost(place, incarnation, "gone", gone))
        return lost

    def _heard(
        self, place: int, incarnation: int, start_offset: int, beat: Beat | None, live: bool, now: float
    ) -> list[Lost]:
        held = self._holders.get(place)
        if held is not None and incarnation < held.incarnation:
            return []
        lost: list[Lost] = []
        if held is None or incarnation > held.incarnation:
            if held is not None and not held.lost:
                lost.append(Lost(place, held.incarnation, "replaced"))
            held = self._holders[place] = Holder(place, incarnation, start_offset, now)
        held.beat = beat if beat is not None else held.beat
        held.heard_at = now
        held.live = held.live or live
        if live and not held.gone:
            held.lost = False  # it was only paused: what it was lost for has been re-driven, it may serve again
        return lost

    def tick(self, now: float) -> list[Lost]:
        """Holders whose silence has just passed DEAD_S."""
        lost = []
        for holder in self._holders.values():
            if not holder.lost and now - holder.heard_at > DEAD_S:
                holder.lost = True
                lost.append(Lost(holder.place, holder.incarnation, "silent"))
        return lost

    def get(self, place: int) -> Holder[Beat] | None:
        return self._holders.get(place)

    def alive(self, now: float) -> Iterator[Holder[Beat]]:
        """Holders that beat, live, and are not under suspicion: the ones to give new work."""
        for holder in self._holders.values():
            if holder.live and not holder.lost and holder.beat is not None and now - holder.heard_at <= SUSPECT_S:
                yield holder

    def free(self, place: int) -> bool:
        """Whether a newcomer may claim the place: nobody has it, or its holder is gone or dead."""
        holder = self._holders.get(place)
        return holder is None or holder.gone or holder.lost

    def is_ghost(self, place: int, incarnation: int) -> bool:
        """Whether a newer holder of the place is known, or this very one is gone or dead."""
        holder = self._holders.get(place)
        if holder is None or incarnation > holder.incarnation:
            return False
        return incarnation < holder.incarnation or holder.lost
