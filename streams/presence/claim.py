"""How a process takes its place, and keeps saying that it holds it. Replicas and gateways alike.

Owns: this process' incarnation, which is the offset of its claim. Ordering relied on: the table's single partition, so
that of two claimants all readers see the same one last, and the last one holds the place. The earlier one learns of it
from the table and must stop at once, publishing nothing more.
A crash: the place stays taken until its silence has been heard for DEAD_S, or a starter that saw the death says so:
the next holder then need not wait, and buries the last one before it does anything slow.

    place = Place(REPLICAS, 3, reader_age)          # and Table(REPLICAS, place.apply) in a TableReader
    await place.wait_free(take_over)                # while the base loads
    claim = await place.claim(writer, start, make, take_over)
    ... in a TaskGroup: place.watch(), Beats(...).run()
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from schemas.gateways import GatewayBeat, GatewayClaim, GatewayState
from schemas.replicas import ReplicaBeat, ReplicaClaim, ReplicaState, ReplicaStatus
from schemas.topics import Topic
from streams.bus.errors import BusUnavailable, MaybeWritten
from streams.bus.table import Change
from streams.bus.writer import Writer
from streams.presence.holders import DEAD_S, Holders
from streams.presence.listening import ListeningClock

log = logging.getLogger(__name__)

State = ReplicaState | GatewayState
BEAT_S = 1.0
LOOK_S = 0.1
TELL_S = 5.0
HEARD_LIMIT_S = 30.0  # listening time; a holder that is dead is known to be so long before
CLAIM_LIMIT_S = 60.0
SEND_LIMIT_S = 5.0
READ_BACK_LIMIT_S = 10.0
RETRY_S = 0.5


class PlaceTakenError(Exception):
    """Somebody alive holds the place."""


class ReplacedError(Exception):
    """Somebody else has claimed the place after this process: it must stop, and publish nothing more."""


@dataclass(frozen=True)
class Claim:
    """The place is this process' own. `incarnation` is the offset of the claim record."""

    place: int
    incarnation: int
    start_offset: int
    nonce: str


class Place:
    """One place, as seen by the process that wants it or has it. `age` is TableReader.age of the table's reader."""

    def __init__(self, topic: Topic, place: int, age: Callable[[float], float]) -> None:
        self.place = place
        self._topic, self._age = topic, age
        self._what = f"{topic.name}/{place}"
        self._holders: Holders[ReplicaBeat | GatewayBeat] = Holders()
        self._clock = ListeningClock()
        self._nonces: dict[str, int] = {}  # own claims, once read back: offset
        self._mine: int | None = None
        self._changed = asyncio.Event()

    def apply(self, change: Change[ReplicaState] | Change[GatewayState]) -> None:
        """Every record of the table, in its order: Table's on_change."""
        state, now = change.value, self._clock.now
        if state is None:
            return
        place = state.replica if isinstance(state, ReplicaClaim | ReplicaBeat) else state.gateway
        if place != self.place:
            return
        match state:
            case ReplicaClaim() | GatewayClaim():
                if state.nonce in self._nonces:
                    self._nonces[state.nonce] = change.offset
                self._holders.claimed(place, change.offset, state.start_offset, change.live, now)
            case ReplicaBeat():
                word = state.reason if state.status is ReplicaStatus.GONE else None
                self._holders.beaten(place, state.incarnation, state.start_offset, state, change.live, now, word)
            case GatewayBeat():
                word = "" if state.gone else None
                self._holders.beaten(place, state.incarnation, 0, state, change.live, now, word)
        self._changed.set()

    async def wait_free(self, take_over: bool = False) -> None:
        """Waits until the place's holder is gone or dead; the table is to be caught up. `take_over`: it surely is.

        Raises PlaceTakenError after HEARD_LIMIT_S of listening, in which a dead holder would have been found out.
        """
        told = began = time.monotonic()
        while not (take_over or self._holders.free(self.place)):
            now = time.monotonic()
            heard_s = self._clock.tick(now, self._age(now))
            self._holders.tick(heard_s)
            holder = self._holders.get(self.place)
            incarnation = holder.incarnation if holder is not None else -1
            if heard_s > HEARD_LIMIT_S:
                raise PlaceTakenError(f"{self._what}: incarnation {incarnation} holds it and is alive: stop that first")
            if now - told >= TELL_S:
                told = now
                log.info(
                    "%s: incarnation %d holds it, or died less than %g s ago; waited %.0f s",
                    self._what,
                    incarnation,
                    DEAD_S,
                    now - began,
                )
            await asyncio.sleep(LOOK_S)

    async def bury(self, writer: Writer) -> None:
        """Says the last word of a replica that its starter saw die, so that nobody waits for its silence to be long.

        For a newcomer that will take long to be ready; the table is to be caught up. Nothing to say is fine.
        """
        holder = self._holders.get(self.place)
        if holder is None or holder.gone or not isinstance(holder.beat, ReplicaBeat):
            return
        word = msgspec.structs.replace(holder.beat, status=ReplicaStatus.GONE, reason="died")
        try:
            await writer.send(self._topic, word, key=str(self.place), timeout_s=SEND_LIMIT_S)
        except BusUnavailable as error:
            log.warning("%s: the death of incarnation %d goes unsaid: %s", self._what, holder.incarnation, error)

    async def claim(
        self,
        writer: Writer,
        start: Callable[[], Awaitable[int]],
        make: Callable[[str, int], ReplicaClaim | GatewayClaim],
        take_over: bool = False,
    ) -> Claim:
        """Takes the place. `start` notes the end of the partition that the place reads; `make(nonce, start_offset)`.

        Raises PlaceTakenError, ReplacedError, or BusUnavailable after CLAIM_LIMIT_S.
        """
        limit = time.monotonic() + CLAIM_LIMIT_S
        while True:
            await self.wait_free(take_over)
            nonce = uuid.uuid4().hex
            self._nonces[nonce] = -1
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + SEND_LIMIT_S):
                    start_offset = await start()
                offset = await self._publish(writer, make(nonce, start_offset), nonce)
                break
            except (BusUnavailable, TimeoutError) as error:
                if time.monotonic() > limit:
                    raise BusUnavailable(f"{self._what}: no claim within {CLAIM_LIMIT_S:g} s: {error}") from error
                log.warning("%s: claim not written yet: %s", self._what, error)
                await asyncio.sleep(RETRY_S)
        self._mine = offset
        self.check()
        log.info("%s: claimed, incarnation %d, reading from %d", self._what, offset, start_offset)
        return Claim(self.place, offset, start_offset, nonce)

    async def watch(self) -> None:
        """Never returns. Raises ReplacedError when the table shows a newer holder, or this one buried alive."""
        while True:
            self._changed.clear()
            self.check()
            holder = self._holders.get(self.place)
            if holder is not None and holder.incarnation == self._mine and holder.gone:
                raise ReplacedError(f"{self._what}: incarnation {self._mine} was taken for dead")
            await self._changed.wait()

    async def _publish(self, writer: Writer, claim: ReplicaClaim | GatewayClaim, nonce: str) -> int:
        """Writes the claim and reads it back. Returns its offset."""
        said = -1
        try:
            said = (await writer.send(self._topic, claim, key=str(self.place), timeout_s=SEND_LIMIT_S)).offset
        except MaybeWritten as error:
            log.warning("%s: looking whether the claim was written: %s", self._what, error)
        try:
            async with asyncio.timeout(READ_BACK_LIMIT_S):
                while self._nonces[nonce] < 0:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise BusUnavailable(f"{self._what}: the claim does not show in the table") from None
        offset = self._nonces[nonce]
        if said not in (-1, offset):
            raise BusUnavailable(f"{self._what}: the claim was written at {said}, but read at {offset}")
        return offset

    def check(self) -> None:
        """Raises ReplacedError. Even an own, earlier claim that shows up late counts: all readers heed it."""
        holder = self._holders.get(self.place)
        if self._mine is not None and holder is not None and holder.incarnation > self._mine:
            raise ReplacedError(f"{self._what}: incarnation {self._mine} was replaced by {holder.incarnation}")


class Beats:
    """The 1 s beat. `make(number)` gives the next one, or None where the process has no right to beat just now."""

    def __init__(self, writer: Writer, topic: Topic, place: int, make: Callable[[int], State | None]) -> None:
        self.first = asyncio.Event()  # set when the first one is in the log
        self._writer, self._topic, self._key, self._make = writer, topic, str(place), make
        self._hurry = asyncio.Event()
        self._number = 0

    def hurry(self) -> None:
        """The next beat goes out now: something in it has changed that others wait for."""
        self._hurry.set()

    async def run(self) -> NoReturn:
        """For ever. A beat that cannot be written within BEAT_S is dropped: the next one says more."""
        unheard = False
        while True:
            began = time.monotonic()
            self._hurry.clear()
            state = self._make(self._number)
            if state is not None:
                self._number += 1
                unheard = not await self._say(state, BEAT_S, quiet=unheard)
            left_s = began + BEAT_S - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):  # not wait_for, which can swallow a cancellation
                    await self._hurry.wait()

    async def last(self, make: Callable[[int], State], limit_s: float = 2.0) -> bool:
        """The last word, once `run` has ended. Whether it was surely written."""
        self._number += 1
        return await self._say(make(self._number), limit_s, quiet=False)

    async def _say(self, state: State, limit_s: float, quiet: bool) -> bool:
        try:
            await self._writer.send(self._topic, state, key=self._key, timeout_s=limit_s)
        except BusUnavailable as error:
            if not quiet:
                log.warning("%s/%s: no beat: %s", self._topic.name, self._key, error)
            return False
        self.first.set()
        return True
