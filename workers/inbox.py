"""What a worker does with each record of its `requests` partition. Pure.

Owns: which (request, attempt) was seen, which requests are cancelled, and which attempts run here. Ordering relied on:
the partition's; one gateway's Cancel follows its Submit. A record read twice changes nothing. A crash loses all of
this, and with it what ran: the next holder starts at a later offset, under a higher incarnation.
"""

from collections.abc import Callable
from dataclasses import dataclass

from schemas.adapters import AdapterRecord
from schemas.reasons import AdapterStatus, FinishReason, RejectReason
from schemas.requests import Cancel, Request, Submit

REMEMBER_S = 600.0  # longer than any request lives
HOLD_S = 0.7  # an adapter the gateway knows must be known here by then; the gateway gives up at 1 s


@dataclass(frozen=True)
class Admit:
    """Start it now; `deadline_at` is monotonic seconds. `adapter` is None for the base model."""

    submit: Submit
    adapter: AdapterRecord | None
    deadline_at: float


@dataclass(frozen=True)
class Reject:
    submit: Submit
    reason: RejectReason
    detail: str


@dataclass(frozen=True)
class Stop:
    """End the running attempt; it is answered by its Finished, with `reason`."""

    request_id: str
    attempt: int
    reason: FinishReason


@dataclass(frozen=True)
class Replaced:
    """A record names a higher incarnation of this replica: someone else holds the place."""

    incarnation: int


Act = Admit | Reject | Stop | Replaced


@dataclass(frozen=True)
class _Held:
    submit: Submit
    deadline_at: float
    until: float


class Inbox:
    """`adapter(id)` reads the live `adapters` table. `is_ghost(place, incarnation)` tells gateways that are no more.

    `limit` is the most attempts that may be open here; `context` the base model's length in tokens.
    """

    def __init__(
        self,
        incarnation: int,
        base_hash: str,
        context: int,
        limit: int,
        adapter: Callable[[str], AdapterRecord | None],
        is_ghost: Callable[[int, int], bool],
    ) -> None:
        self._incarnation, self._base_hash, self._context, self._limit = incarnation, base_hash, context, limit
        self._adapter, self._is_ghost = adapter, is_ghost
        self._seen: dict[str, tuple[int, float]] = {}  # request -> highest attempt, when
        self._cancelled: dict[str, tuple[int, float]] = {}
        self._held: list[_Held] = []
        self._open: dict[str, tuple[Submit, float]] = {}  # request -> what runs, its deadline
        self.draining = False
        self.closed: Callable[[str], bool] = lambda _: False  # contents for which no new attempt is taken

    @property
    def open(self) -> int:
        return len(self._open) + len(self._held)

    def read(self, record: Request, now: float) -> list[Act]:
        """One record, in the partition's order. `now` is monotonic seconds."""
        if isinstance(record, Cancel):
            return self._cancel(record, now)
        if record.incarnation > self._incarnation:
            return [Replaced(record.incarnation)]
        if record.attempt <= self._seen.get(record.request_id, (-1, 0.0))[0]:
            return []
        self._seen[record.request_id] = (record.attempt, now)
        if record.attempt <= self._cancelled.get(record.request_id, (-1, 0.0))[0]:
            return []
        # An older attempt of it may run here: the gateway has given that one up.
        acts: list[Act] = self._stop(record.request_id, FinishReason.CANCELLED)
        self._held = [h for h in self._held if h.submit.request_id != record.request_id]
        return acts + self._submit(record, now + record.remaining_ms / 1000, now, now + HOLD_S)

    def finished(self, request_id: str, attempt: int) -> None:
        """The engine has said its last word on the attempt."""
        entry = self._open.get(request_id)
        if entry is not None and entry[0].attempt == attempt:
            del self._open[request_id]

    def tick(self, now: float) -> list[Act]:
        """Deadlines, adapters that came late, gateways that died. A few times a second."""
        acts: list[Act] = []
        held, self._held = self._held, []
        for h in held:
            acts += self._submit(h.submit, h.deadline_at, now, h.until)
        for submit, deadline_at in list(self._open.values()):
            if now >= deadline_at:
                acts += self._stop(submit.request_id, FinishReason.DEADLINE)
            elif self._is_ghost(submit.gateway, submit.gateway_incarnation):
                acts += self._stop(submit.request_id, FinishReason.GATEWAY_LOST)
        for memory in (self._seen, self._cancelled):
            # Insertion order is age order, except for what was seen again; that only lives a little longer.
            while memory and now - next(iter(memory.values()))[1] > REMEMBER_S:
                del memory[next(iter(memory))]
        return acts

    def _cancel(self, cancel: Cancel, now: float) -> list[Act]:
        # A Cancel read twice must not take back a later one.
        attempt = max(cancel.attempt, self._cancelled.get(cancel.request_id, (-1, 0.0))[0])
        self._cancelled[cancel.request_id] = (attempt, now)
        self._held = [
            h for h in self._held if h.submit.request_id != cancel.request_id or h.submit.attempt > cancel.attempt
        ]
        entry = self._open.get(cancel.request_id)
        if entry is None or entry[0].attempt > cancel.attempt:
            return []
        return self._stop(cancel.request_id, FinishReason.CANCELLED)

    def _stop(self, request_id: str, reason: FinishReason) -> list[Act]:
        entry = self._open.pop(request_id, None)
        return [] if entry is None else [Stop(request_id, entry[0].attempt, reason)]

    def _submit(self, submit: Submit, deadline_at: float, now: float, hold_until: float) -> list[Act]:
        if self._is_ghost(submit.gateway, submit.gateway_incarnation):
            return [Reject(submit, RejectReason.GATEWAY_LOST, "")]
        record = self._adapter(submit.adapter) if submit.adapter else None
        if submit.adapter and record is None and now < hold_until and submit.incarnation == self._incarnation:
            self._held.append(_Held(submit, deadline_at, hold_until))
            return []
        refusal = self._refusal(submit, record, deadline_at, now)
        if refusal is not None:
            return [Reject(submit, *refusal)]
        self._open[submit.request_id] = (submit, deadline_at)
        return [Admit(submit, record, deadline_at)]

    def _refusal(
        self, submit: Submit, record: AdapterRecord | None, deadline_at: float, now: float
    ) -> tuple[RejectReason, str] | None:
        if submit.incarnation < self._incarnation:
            return RejectReason.STALE, f"incarnation {submit.incarnation}, here {self._incarnation}"
        if self.draining:
            return RejectReason.DRAINING, ""
        if now >= deadline_at:
            return RejectReason.DEADLINE, ""
        if submit.base_hash != self._base_hash:
            return RejectReason.BASE_MISMATCH, f"base {submit.base_hash[:12]}, here {self._base_hash[:12]}"
        if len(submit.prompt) + submit.max_tokens > self._context or len(submit.generated) >= submit.max_tokens:
            return RejectReason.TOO_LONG, f"{len(submit.prompt)} + {submit.max_tokens} tokens, context {self._context}"
        if len(self._open) >= self._limit:
            return RejectReason.OVERLOADED, f"{len(self._open)} open"
        if not submit.adapter:
            return None
        if record is None:
            return RejectReason.UNKNOWN_ADAPTER, submit.adapter
        if record.content_id != submit.content_id:
            return RejectReason.CONTENT_MISMATCH, f"{submit.adapter} is {record.content_id[:12]} here"
        if record.base_model_hash != self._base_hash:
            return RejectReason.BASE_MISMATCH, f"{submit.adapter} was trained on {record.base_model_hash[:12]}"
        if record.customer != submit.customer:
            return RejectReason.UNKNOWN_ADAPTER, submit.adapter
        if record.status is AdapterStatus.RETIRED:
            return RejectReason.RETIRED, submit.adapter
        if record.status is AdapterStatus.QUARANTINED:
            return RejectReason.QUARANTINED, record.why
        if self.closed(record.content_id):
            return RejectReason.DRAINING, f"{submit.adapter} is just being taken out of its slot here"
        return None
