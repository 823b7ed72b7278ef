"""`requests` -> the engine: this replica's partition, read as fast as it comes.

Never pauses, whatever waits behind it: each record becomes an answer, a sequence in the engine, or nothing. Rejected
leaves at once. Admitted leaves with the next step or tick, whichever is first: a record of its own would hold up the
first token, for a partition has one batch on its way at a time. What to do is decided by inbox.py; here it is done.
Ordering relied on: the partition's. The reading starts at the claim's start offset; a position that the log has no more
ends the worker, for only a new claim can say where to go on. A crash loses nothing that was promised: gateways re-drive
what a dead incarnation had.
"""

import asyncio
import logging
import time
from typing import TYPE_CHECKING, NoReturn

from schemas.reasons import Tier
from schemas.requests import Submit
from schemas.tokens import Rejected
from schemas.topics import REQUESTS
from streams.bus.reader import Reader
from streams.presence.claim import ReplacedError
from workers.engine_client import EngineClient
from workers.inbox import Act, Admit, Inbox, Reject, Replaced, Stop
from workers.loader.owned import Usage
from workers.loading import Loading
from workers.publisher import Publisher
from workers.sequences import Say, Sequences

if TYPE_CHECKING:
    from workers.traces import Traces

log = logging.getLogger(__name__)

TICK_S = 0.1
LAG_TOLD_S = 0.25


class Intake:
    """`read` and `tick` are its two tasks. `publisher` asks `read_offset` for its load reports.

    `traces`: where attempts are traced, if they are.
    """

    def __init__(
        self,
        reader: Reader,
        replica: int,
        inbox: Inbox,
        sequences: Sequences,
        engine: EngineClient,
        loading: Loading,
        usage: Usage,
        traces: "Traces | None" = None,
    ) -> None:
        self._reader, self._replica = reader, replica
        self._inbox, self._sequences, self._engine, self._loading = inbox, sequences, engine, loading
        self._usage, self._traces = usage, traces
        self._unread: int | None = None  # the first offset that the engine's end left unread

    @property
    def read_offset(self) -> int:
        """The next offset of `requests`: everything before it was answered, or waits for its adapter's record."""
        return self._reader.position(REQUESTS, self._replica) if self._unread is None else self._unread

    async def read(self, publisher: Publisher) -> NoReturn:
        """For ever. Raises OffsetLost, or ReplacedError for a record that names a later incarnation."""
        while True:
            records = await self._reader.poll()
            if records and self._engine.ended:
                # The last word says so: it must not be held against these that they were here at an engine's crash.
                self._unread = records[0].offset
                await asyncio.Future[NoReturn]()
            rejected = False
            for record in records:
                if record.value is not None:
                    if self._traces is not None and isinstance(record.value, Submit):
                        self._traces.read(record.value, record.headers)
                    acts = self._inbox.read(record.value, time.monotonic())
                    rejected = rejected or any(isinstance(act, Reject) for act in acts)
                    self._do(acts, publisher)
            if rejected:
                publisher.flush()

    async def tick(self, publisher: Publisher) -> NoReturn:
        """Deadlines, late adapters, dead gateways; and a word when this loop itself was late."""
        due = time.monotonic()
        while True:
            due = max(due + TICK_S, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            now = time.monotonic()
            if now - due > LAG_TOLD_S:
                log.warning("the event loop was %.0f ms late", (now - due) * 1000)
            self._do(self._inbox.tick(now), publisher)
            publisher.flush()

    def _do(self, acts: list[Act], publisher: Publisher) -> None:
        for act in acts:
            match act:
                case Admit():
                    self._admit(act, publisher)
                case Reject(submit=submit):
                    event = Rejected(submit.request_id, submit.attempt, act.reason, act.detail)
                    publisher.add(Say(submit.gateway, submit.gateway_incarnation, event))
                    if self._traces is not None:
                        self._traces.rejected(submit, act.reason)
                    log.info("rejected %s/%d: %s %s", submit.request_id, submit.attempt, act.reason, act.detail)
                case Stop():
                    if (cancel := self._sequences.stop(act)) is not None:
                        self._engine.send(cancel)
                case Replaced():
                    raise ReplacedError(f"a record in requests/{self._replica} names incarnation {act.incarnation}")

    def _admit(self, admit: Admit, publisher: Publisher) -> None:
        tier = Tier.NONE if admit.adapter is None else self._loading.tier(admit.adapter)
        start, say = self._sequences.admit(admit, tier, time.monotonic())
        if start.content_id:
            self._loading.residency.use(start.content_id)
            self._usage.use(start.content_id, time.monotonic())
        self._engine.send(start)
        publisher.add(say, () if self._traces is None else self._traces.admitted(admit.submit, tier))
