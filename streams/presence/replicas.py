"""The fleet's replicas as a reader of the table `replicas` sees them.

Owns that view. Ordering relied on: the table's single partition. A crash loses nothing: the view is rebuilt from the
table, in which records of the past prove nothing, so that `heard` is false for the first seconds.
"""

from schemas.replicas import ReplicaBeat, ReplicaClaim, ReplicaState, ReplicaStatus
from streams.bus.table import Change
from streams.presence.holders import Holders
from streams.presence.listening import ListeningClock


class Replicas:
    """`apply` is the table's `on_change`; `tick` is called a few times a second."""

    def __init__(self) -> None:
        self._holders: Holders[ReplicaBeat] = Holders()
        self._places: set[int] = set()
        self._clock = ListeningClock()

    def apply(self, change: Change[ReplicaState]) -> None:
        state, now = change.value, self._clock.now
        match state:
            case ReplicaClaim():
                self._places.add(state.replica)
                self._holders.claimed(state.replica, change.offset, state.start_offset, change.live, now)
            case ReplicaBeat():
                self._places.add(state.replica)
                gone = state.reason if state.status is ReplicaStatus.GONE else None
                self._holders.beaten(
                    state.replica, state.incarnation, state.start_offset, state, change.live, now, gone
                )

    def tick(self, now: float, age: float) -> None:
        """`now`: time.monotonic(); `age`: seconds since the reader last heard from Kafka."""
        self._holders.tick(self._clock.tick(now, age))

    @property
    def heard(self) -> bool:
        """Whether it is known of every place if its holder lives."""
        holders = [self._holders.get(place) for place in self._places]
        return all(holder is None or holder.live or holder.lost or holder.gone for holder in holders)

    def beats(self) -> dict[int, ReplicaBeat]:
        """The last of each replica that lives, by its place."""
        alive = self._holders.alive(self._clock.now)
        return {holder.place: holder.beat for holder in alive if holder.beat is not None}

    def serving(self, base_hash: str) -> dict[int, ReplicaBeat]:
        """Of these, the ones that take work for this base."""
        return {
            place: beat
            for place, beat in self.beats().items()
            if beat.status is ReplicaStatus.READY and beat.base_hash == base_hash
        }
