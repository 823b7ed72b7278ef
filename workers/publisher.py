"""`tokens`: what each engine step and each answer means to a gateway, one TokenBatch at a time.

Owns the words not yet handed to the Writer, per gateway incarnation, and hands them over in order. What one engine step
or one read of `requests` says becomes one record per gateway, with the load as of then. While AHEAD records of a
gateway are unacknowledged (the broker is away or slow), words pile up here instead and the tokens of one attempt grow
together: memory is bounded by what open attempts may say, and nothing is lost. What is too much for one record goes out
in several; no single event comes near a record's limit.

A record that the Writer gives up is a gap, which absolute positions show to the gateway. A last word (Finished,
Rejected) has no successor that would show the gap: it is said again, behind everything said since. A crash loses
what was not acknowledged; the next incarnation says nothing about it, and gateways re-drive.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from schemas.tokens import Finished, LoadReport, Rejected, TokenBatch, TokenEvent, Tokens
from schemas.topics import TOKENS
from streams.bus.errors import BusUnavailable
from streams.bus.reader import Headers
from streams.bus.writer import MAX_RECORD_BYTES, Writer, Written
from workers.sequences import Say

log = logging.getLogger(__name__)

AHEAD = 64
MOST_BYTES = MAX_RECORD_BYTES - 4_000  # of a record's events; the rest is for what stands around them
MOST_IDS = 1_000  # of one event
MOST_DETAIL = 2_000  # characters
MOST_HEADERS = 24  # of one record: they are within what stands around its events

Gateway = tuple[int, int]  # place, incarnation
_PACK = msgspec.msgpack.Encoder()


@dataclass
class _Outbox:
    events: list[TokenEvent] = field(default_factory=list)
    last: dict[tuple[str, int], int] = field(default_factory=dict)  # attempt -> index of its last event
    unacknowledged: int = 0
    headers: list[tuple[str, bytes]] = field(default_factory=list)


class Publisher:
    """`load` is asked at each flush; `is_ghost` tells gateways that nobody needs to say anything to any more."""

    def __init__(
        self,
        writer: Writer,
        replica: int,
        incarnation: int,
        load: Callable[[], LoadReport],
        is_ghost: Callable[[int, int], bool],
    ) -> None:
        self._writer, self._replica, self._incarnation = writer, replica, incarnation
        self._load, self._is_ghost = load, is_ghost
        self._outboxes: dict[Gateway, _Outbox] = {}
        self._silent = False
        self.lost = 0  # records that the Writer gave up

    def add(self, say: Say, headers: Headers = ()) -> None:
        """Goes out with the next flush; so do `headers`, with its record or one behind it."""
        outbox = self._outboxes.setdefault((say.gateway, say.gateway_incarnation), _Outbox())
        outbox.headers += headers
        event, key = say.event, (say.event.request_id, say.event.attempt)
        if isinstance(event, Finished | Rejected) and len(event.detail) > MOST_DETAIL:
            event = msgspec.structs.replace(event, detail=event.detail[:MOST_DETAIL])
        if isinstance(event, Tokens) and (index := outbox.last.get(key)) is not None:
            before = outbox.events[index]
            if (
                isinstance(before, Tokens)
                and before.position + len(before.ids) == event.position
                and len(before.ids) < MOST_IDS
            ):
                before.ids.extend(event.ids)
                before.scores.extend(event.scores)
                return
        outbox.last[key] = len(outbox.events)
        outbox.events.append(event)

    def flush(self) -> None:
        """Hands over what was said, unless too much is on its way already; never waits."""
        for gateway, outbox in list(self._outboxes.items()):
            while outbox.events and outbox.unacknowledged < AHEAD and not self._silent:
                events = _cut(outbox)
                if not self._sent(gateway, outbox, events):
                    _put_back(outbox, events)
                    return
            if not outbox.events and not outbox.unacknowledged:
                del self._outboxes[gateway]

    def silence(self) -> None:
        """Somebody else holds the place: not another word."""
        self._silent = True
        self._outboxes.clear()

    async def drained(self, limit_s: float) -> bool:
        """Waits until everything said is acknowledged; whether that is so."""
        end = asyncio.get_running_loop().time() + limit_s
        self.flush()
        while self._outboxes:
            if asyncio.get_running_loop().time() > end:
                return False
            await asyncio.sleep(0.01)
        return True

    def _sent(self, gateway: Gateway, outbox: _Outbox, events: list[TokenEvent]) -> bool:
        """Hands over one record; False if the Writer takes none just now."""
        batch = TokenBatch(self._replica, self._incarnation, *gateway, self._load(), events)
        try:
            headers = outbox.headers[:MOST_HEADERS]
            future = self._writer.send_nowait(TOKENS, batch, partition=gateway[0], headers=headers)
        except BusUnavailable:
            return False
        except ValueError as error:  # a gateway place that does not exist: there is nobody to tell
            log.error("nothing sent to gateway %d: %s", gateway[0], error)
            return True
        del outbox.headers[:MOST_HEADERS]
        outbox.unacknowledged += 1

        def acknowledged(future: asyncio.Future[Written]) -> None:
            outbox.unacknowledged -= 1
            if not future.cancelled() and (error := future.exception()) is not None:
                self._gave_up(gateway, events, error)
            # Not flushed from here: the Writer is failing what lies behind this record, one by one.
            asyncio.get_running_loop().call_soon(self.flush)

        future.add_done_callback(acknowledged)
        return True

    def _gave_up(self, gateway: Gateway, events: list[TokenEvent], error: BaseException) -> None:
        self.lost += 1
        log.warning("tokens for gateway %d: %d events not surely written: %s", gateway[0], len(events), error)
        if self._silent or self._is_ghost(*gateway):
            return
        for event in events:
            if isinstance(event, Finished | Rejected):
                self.add(Say(*gateway, event))


def _cut(outbox: _Outbox) -> list[TokenEvent]:
    """Takes the first events out, up to MOST_BYTES in all; no single one has more."""
    size = 0
    for index, event in enumerate(outbox.events if len(outbox.events) > 1 else ()):
        size += len(_PACK.encode(event))
        if size > MOST_BYTES and index:
            events, outbox.events = outbox.events[:index], outbox.events[index:]
            outbox.last = _last(outbox.events)
            return events
    events, outbox.events, outbox.last = outbox.events, [], {}
    return events


def _put_back(outbox: _Outbox, events: list[TokenEvent]) -> None:
    outbox.events = events + outbox.events
    outbox.last = _last(outbox.events)


def _last(events: list[TokenEvent]) -> dict[tuple[str, int], int]:
    return {(event.request_id, event.attempt): index for index, event in enumerate(events)}
