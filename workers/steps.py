"""The engine's events, in its order, to whom they concern: tokens to gateways, ends to `ended`, slots to loading.

A token goes to the Writer in the same turn of the loop in which it is read. A crash of the engine ends this task with
EngineCrashedError; what the engine had said before was handled before.
"""

import logging
import time
from collections.abc import Callable

from schemas.engine import Leases, Merged, MergeFailed, Ready, SlotLoaded, Step, Unmerged
from schemas.reasons import Tier
from schemas.stats import AttemptFinished
from workers import audit
from workers.engine_client import EngineClient
from workers.inbox import Inbox
from workers.loading import Loading
from workers.publisher import Publisher
from workers.sequences import Sequences
from workers.tiers import Tiers

log = logging.getLogger(__name__)


async def follow(
    engine: EngineClient,
    sequences: Sequences,
    inbox: Inbox,
    loading: Loading,
    publisher: Publisher,
    ended: Callable[[AttemptFinished], None],
    tiers: Tiers,
) -> None:
    """Until the engine ends. `ended` is told of each attempt's. Raises EngineCrashedError."""
    async for event in engine.events():
        match event:
            case Step():
                says, rows = sequences.step(event, time.monotonic())
                for say in says:
                    publisher.add(say)
                for row in rows:
                    inbox.finished(row.request_id, row.attempt)
                    ended(row)
                publisher.flush()
            case Leases():
                tiers.slot_leases, tiers.kv_blocks = len(event.held), event.blocks
                tiers.incidents.found(Tier.GPU, audit.of_slots(event, sequences.contents()))
            case Ready():
                raise RuntimeError("the engine said Ready twice")
            case Merged() | Unmerged() | MergeFailed():
                log.info("%s", event)
            case _:
                if isinstance(event, SlotLoaded):
                    sequences.loaded(event.content_id, time.monotonic())
                loading.event(event)
