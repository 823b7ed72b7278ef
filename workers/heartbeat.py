"""The worker's beat: what it says of itself each second, and whether it has the right to.

The right is the engine's: a beat goes out only while the last step or tick is fresh, so that a hung engine falls silent
however well this process does. Beats go through the cold writer; the same load goes with each TokenBatch.
"""

import time
from collections.abc import Callable

from schemas.engine import Ready
from schemas.replicas import Answer, FailedLoad, ReplicaBeat, ReplicaStatus, Residency, TierReport
from schemas.tokens import LoadReport
from streams.presence.claim import Claim
from workers.engine_client import EngineClient
from workers.sequences import Sequences


class Heartbeat:
    """`beat` and `last` make beats for streams.presence.claim.Beats. `status` is what the next beat says."""

    def __init__(
        self,
        claim: Claim,
        ready: Ready,
        capacity_tokens: int,
        engine: EngineClient,
        sequences: Sequences,
        load: Callable[[], LoadReport],
        residency: Callable[[], Residency],
        tiers: Callable[[], TierReport],
        answers: Callable[[], list[Answer]],
        failed_loads: Callable[[], list[FailedLoad]],
    ) -> None:
        self.status = ReplicaStatus.READY
        self._claim, self._ready, self._capacity_tokens = claim, ready, capacity_tokens
        self._engine, self._sequences, self._load = engine, sequences, load
        self._residency, self._tiers = residency, tiers
        self._answers, self._failed_loads = answers, failed_loads

    def beat(self, number: int) -> ReplicaBeat | None:
        """None while the engine is silent."""
        return self._make(number, self.status, "") if self._engine.fresh else None

    def gone(self, number: int, reason: str) -> ReplicaBeat:
        """The last word."""
        return self._make(number, ReplicaStatus.GONE, reason)

    def _make(self, number: int, status: ReplicaStatus, reason: str) -> ReplicaBeat:
        return ReplicaBeat(
            replica=self._claim.place,
            incarnation=self._claim.incarnation,
            start_offset=self._claim.start_offset,
            beat=number,
            status=status,
            step=self._sequences.steps,
            load=self._load(),
            residency=self._residency(),
            base_hash=self._ready.base_hash,
            numeric_class=self._ready.numeric_class,
            capacity_tokens=self._capacity_tokens,
            at_unix_ms=int(time.time() * 1000),
            mixed_steps=self._sequences.mixed_steps,
            max_adapters_in_step=self._sequences.max_adapters_in_step,
            reason=reason,
            tiers=self._tiers(),
            answers=self._answers(),
            failed_loads=self._failed_loads(),
        )
