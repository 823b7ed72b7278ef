"""Which incarnations of gateways will write no row any more, as the `gateways` table tells. Pure.

Ordering relied on: the table's single partition. A crash loses only since when they are known to be over: a restarted
reader counts from its own start, that is, it is later by that much.
"""

from collections.abc import Iterable

from schemas.gateways import GatewayBeat, GatewayClaim, GatewayState
from streams.presence.holders import Holders

# From a newer claim, or the last word, to when no row of it can still be on its way.
OVER_S = 30.0
# Without a newer claim it may only be paused or cut off, and would report its requests once it is back. Longer than a
# request may take and its row may wait.
SILENT_S = 1800.0
STIRRED_S = 900.0  # workers tell of the last attempts for a dead gateway well within it

Gateway = tuple[int, int]  # place, incarnation


class DeadGateways:
    """`now` is listening time of the table's reader everywhere."""

    def __init__(self) -> None:
        self._holders: Holders[GatewayBeat] = Holders()
        self._since: dict[int, float] = {}  # place -> when its holder changed or said its last word

    def apply(self, offset: int, state: GatewayState, live: bool, now: float) -> None:
        """A record of the table, in its order."""
        place = state.gateway
        before = self._state(place)
        match state:
            case GatewayClaim():
                self._holders.claimed(place, offset, state.start_offset, live, now)
            case GatewayBeat():
                self._holders.beaten(place, state.incarnation, 0, state, live, now, "" if state.gone else None)
        if self._state(place) != before:
            self._since[place] = now

    def stirred(self, now: float) -> bool:
        """Whether a place lost its holder lately, so that there may be something to close."""
        silences = (now - holder.heard_at for place in self._since if (holder := self._holders.get(place)) is not None)
        return any(now - since < OVER_S + STIRRED_S for since in self._since.values()) or any(
            SILENT_S < silence < SILENT_S + STIRRED_S for silence in silences
        )

    def among(self, gateways: Iterable[Gateway], now: float) -> list[Gateway]:
        """Those that are over, for certain and for long enough."""
        return [gateway for gateway in gateways if self._over(*gateway, now)]

    def _over(self, place: int, incarnation: int, now: float) -> bool:
        holder = self._holders.get(place)
        if holder is None or incarnation > holder.incarnation:
            return False
        if incarnation < holder.incarnation or holder.gone:
            return now - self._since[place] >= OVER_S
        return now - holder.heard_at > SILENT_S

    def _state(self, place: int) -> tuple[int, bool] | None:
        holder = self._holders.get(place)
        return None if holder is None else (holder.incarnation, holder.gone)
