"""The live gateways, and how far each has applied each table: by this one knows when a change holds everywhere. Pure.

Owns the view of the `gateways` table. `now` is listening time of the tables' reader. A gateway counts until it is gone
or dead: one that is only silent may still serve by its old tables.
"""

from schemas.gateways import GatewayBeat, GatewayClaim, GatewayState
from streams.presence.holders import Holders


class Peers:
    def __init__(self) -> None:
        self._holders: Holders[GatewayBeat] = Holders()
        self._places: set[int] = set()

    def apply(self, offset: int, state: GatewayState, live: bool, now: float) -> None:
        """A record of the table, in its order."""
        self._places.add(state.gateway)
        match state:
            case GatewayClaim():
                self._holders.claimed(state.gateway, offset, state.start_offset, live, now)
            case GatewayBeat():
                word = "" if state.gone else None
                self._holders.beaten(state.gateway, state.incarnation, 0, state, live, now, word)

    def tick(self, now: float) -> None:
        self._holders.tick(now)

    def behind(self, table: str, partition: int, offset: int) -> list[int]:
        """The gateways that may not have applied the record at `offset`, by place."""
        return [place for place in sorted(self._places) if not self._passed(place, table, partition, offset)]

    def _passed(self, place: int, table: str, partition: int, offset: int) -> bool:
        holder = self._holders.get(place)
        if holder is None or self._holders.free(place):
            return True
        if holder.beat is None or holder.beat.incarnation != holder.incarnation:
            return False
        return holder.beat.tables.get(table, {}).get(partition, -1) > offset
