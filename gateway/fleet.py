"""The replicas as this gateway sees them: who lives, how loaded, and which one a request should go to. Pure.

Owns the view of the `replicas` table and of the loads. `now` is listening time of the tables' reader. A crash loses
nothing: the view is rebuilt from the table, and nothing is routed to a replica before a live beat of it.
"""

from collections.abc import Mapping

from gateway.flight import Flight
from gateway.loadview import LoadView
from gateway.router import Candidate, NoRoute, Route, route
from schemas.placement import OwnerPlan
from schemas.replicas import ReplicaBeat, ReplicaClaim, ReplicaState, ReplicaStatus
from streams.placement.rendezvous import OWNERS
from streams.placement.warm import cold_owners
from streams.presence.holders import Holders, Lost


class Fleet:
    """`plans` is the live owner-plans table, by adapter id. Only replicas that serve `base_hash` are candidates."""

    def __init__(self, base_hash: str, plans: Mapping[str, OwnerPlan]) -> None:
        self.holders: Holders[ReplicaBeat] = Holders()
        self.loads = LoadView()
        self._base_hash, self._plans = base_hash, plans

    def apply(self, offset: int, state: ReplicaState, live: bool, now: float) -> list[Lost]:
        """A record of the table, in its order. Returns the incarnations it ended."""
        match state:
            case ReplicaClaim():
                return self.holders.claimed(state.replica, offset, state.start_offset, live, now)
            case ReplicaBeat():
                self.loads.reported(state.replica, state.incarnation, state.load)
                gone = state.reason if state.status is ReplicaStatus.GONE else None
                return self.holders.beaten(state.replica, state.incarnation, state.start_offset, state, live, now, gone)

    def beats(self, now: float) -> list[ReplicaBeat]:
        """The last of each replica that lives."""
        return [holder.beat for holder in self.holders.alive(now) if holder.beat is not None]

    def candidates(self, now: float) -> list[Candidate]:
        """Replicas that may be given work now."""
        return [
            Candidate(h.place, h.incarnation, self.loads.load(h.place, h.incarnation), h.beat.capacity_tokens)
            for h in self.holders.alive(now)
            if h.beat is not None
            and h.beat.status is ReplicaStatus.READY
            and h.beat.base_hash == self._base_hash
            and not self.loads.replaced(h.place, h.incarnation)
        ]

    def cold(self, adapter: str, now: float) -> list[int]:
        """The adapter's owners that have it in no slot."""
        slots = {}
        for candidate in self.candidates(now):
            holder = self.holders.get(candidate.replica)
            if holder is not None and holder.beat is not None:
                slots[candidate.replica] = holder.beat.residency.gpu_adapters
        plan = self._plans.get(adapter)
        return cold_owners(adapter, slots, plan.owners if plan is not None else OWNERS)

    def choose(self, flight: Flight, now: float) -> Route | NoRoute:
        """The replica for the flight's next attempt. Where only one may answer, it takes it however full it is."""
        candidates = self.candidates(now)
        if flight.ask.only_on is not None:
            held = next((c for c in candidates if c.replica == flight.ask.only_on), None)
            return NoRoute(overloaded=False) if held is None else Route(held.replica, held.incarnation, spilled=False)
        plan = self._plans.get(flight.ask.adapter)
        owners = plan.owners if plan is not None else OWNERS
        return route(flight.ask.adapter, candidates, flight.cost, owners, flight.avoid)
