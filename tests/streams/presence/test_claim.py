"""Claims and beats through the real broker."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from schemas.gateways import GatewayBeat, GatewayClaim, GatewayState
from schemas.replicas import ReplicaBeat, ReplicaClaim, ReplicaState, ReplicaStatus, Residency
from schemas.tokens import LoadReport
from schemas.topics import GATEWAYS, REPLICAS
from streams.bus.admin import ensure_topics
from streams.bus.settings import KafkaSettings
from streams.bus.table import Change, Table, TableReader
from streams.bus.writer import Writer
from streams.presence.claim import Beats, Claim, Place, PlaceTakenError, ReplacedError
from streams.presence.holders import Holders

pytestmark = pytest.mark.real


@dataclass
class Candidate:
    """One process that wants gateway place 3, with clients of its own. `seen`: what its table showed."""

    place: Place
    writer: Writer
    seen: list[Change[GatewayState]]

    async def claim(self, take_over: bool = False, start_offset: int = 0) -> Claim:
        async def start() -> int:
            return start_offset

        return await self.place.claim(
            self.writer, start, lambda nonce, offset: GatewayClaim(3, nonce, offset, 0), take_over
        )

    def beats(self, claim: Claim) -> Beats:
        return Beats(self.writer, GATEWAYS, 3, lambda n: GatewayBeat(3, claim.incarnation, n, 0, {}))


@asynccontextmanager
async def candidate(settings: KafkaSettings) -> AsyncIterator[Candidate]:
    seen: list[Change[GatewayState]] = []

    def on_change(change: Change[GatewayState]) -> None:
        seen.append(change)
        place.apply(change)

    name = f"candidate-{uuid.uuid4().hex[:4]}"
    reader = TableReader(settings, [Table(GATEWAYS, on_change)], name, fetch_wait_ms=20)
    place = Place(GATEWAYS, 3, reader.age)
    async with reader, Writer(settings, name) as writer:
        await reader.caught_up(10)
        yield Candidate(place, writer, seen)


@pytest.fixture
async def settings(kafka: str, namespace: str) -> KafkaSettings:
    settings = KafkaSettings(bootstrap_servers=kafka, namespace=namespace, replica_places=2, gateway_places=4)
    await ensure_topics(settings)
    return settings


async def test_a_claims_offset_is_its_incarnation(settings: KafkaSettings) -> None:
    async with candidate(settings) as one:
        claim = await one.claim(start_offset=17)
        assert [c.offset for c in one.seen] == [claim.incarnation]
        assert claim.start_offset == 17
        assert one.seen[0].value == GatewayClaim(3, claim.nonce, 17, 0)


async def test_a_newer_claim_replaces_the_holder(settings: KafkaSettings) -> None:
    async with candidate(settings) as old, candidate(settings) as new:
        first = await old.claim()
        watch = asyncio.create_task(old.place.watch())
        second = await new.claim(take_over=True)
        assert second.incarnation > first.incarnation
        with pytest.raises(ReplacedError, match=f"{first.incarnation} was replaced by {second.incarnation}"):
            await asyncio.wait_for(watch, 5)


async def test_of_two_claimants_exactly_one_stays(settings: KafkaSettings) -> None:
    async with candidate(settings) as one, candidate(settings) as two:

        async def hold(candidate: Candidate) -> int:
            claim = await candidate.claim()
            await asyncio.wait_for(candidate.place.watch(), 2)
            return claim.incarnation

        ends = await asyncio.gather(hold(one), hold(two), return_exceptions=True)
        assert {type(end) for end in ends} == {ReplacedError, TimeoutError}


async def test_a_newcomer_waits_for_a_silent_holder_and_not_for_one_that_said_good_bye(
    settings: KafkaSettings,
) -> None:
    async with candidate(settings) as old:
        claim = await old.claim()
        beats = asyncio.create_task(old.beats(claim).run())
        async with candidate(settings) as new:
            waiting = asyncio.create_task(new.place.wait_free())
            await asyncio.sleep(2.5)
            assert not waiting.done()
            beats.cancel()
            last = old.beats(claim)
            assert await last.last(lambda n: GatewayBeat(3, claim.incarnation, n, 0, {}, gone=True))
            await asyncio.wait_for(waiting, 2)
            assert (await new.claim()).incarnation > claim.incarnation


async def test_a_newcomer_takes_the_place_of_a_holder_that_fell_silent(settings: KafkaSettings) -> None:
    async with candidate(settings) as old:
        claim = await old.claim()
        async with candidate(settings) as new:
            began = time.monotonic()
            assert (await new.claim()).incarnation > claim.incarnation
            assert time.monotonic() - began > 5


async def test_a_place_whose_holder_lives_is_refused(settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streams.presence.claim.HEARD_LIMIT_S", 6.0)
    async with candidate(settings) as old:
        claim = await old.claim()
        beats = asyncio.create_task(old.beats(claim).run())
        async with candidate(settings) as new:
            with pytest.raises(PlaceTakenError, match=f"gateways/3: incarnation {claim.incarnation} holds it"):
                await new.claim()
        beats.cancel()


async def test_beats_come_each_second_only_with_the_right_to(settings: KafkaSettings) -> None:
    async with candidate(settings) as one:
        claim = await one.claim()
        silent = False
        beats = Beats(
            one.writer, GATEWAYS, 3, lambda n: None if silent else GatewayBeat(3, claim.incarnation, n, 0, {})
        )
        task = asyncio.create_task(beats.run())
        await asyncio.wait_for(beats.first.wait(), 5)
        await asyncio.sleep(2.6)
        silent = True
        await asyncio.sleep(0.5)
        before = len(one.seen)
        await asyncio.sleep(1.6)
        assert len(one.seen) == before >= 3
        silent = False
        beats.hurry()
        await asyncio.sleep(0.3)
        assert len(one.seen) == before + 1
        task.cancel()


@asynccontextmanager
async def replica(settings: KafkaSettings, holders: Holders[ReplicaBeat]) -> AsyncIterator[tuple[Place, Writer]]:
    """A process that wants replica place 1; `holders` is what its table says, as a gateway would read it."""

    def on_change(change: Change[ReplicaState]) -> None:
        place.apply(change)
        match change.value:
            case ReplicaClaim() as claim:
                holders.claimed(1, change.offset, claim.start_offset, change.live, 0.0)
            case ReplicaBeat() as beat:
                word = beat.reason if beat.status is ReplicaStatus.GONE else None
                holders.beaten(1, beat.incarnation, 0, beat, change.live, 0.0, word)

    name = f"replica-{uuid.uuid4().hex[:4]}"
    reader = TableReader(settings, [Table(REPLICAS, on_change)], name, fetch_wait_ms=20)
    place = Place(REPLICAS, 1, reader.age)
    async with reader, Writer(settings, name) as writer:
        await reader.caught_up(10)
        yield place, writer


async def take(place: Place, writer: Writer) -> Claim:
    async def start() -> int:
        return 0

    return await place.claim(writer, start, lambda nonce, at: ReplicaClaim(1, nonce, at, "base", "class", 0), True)


def beat(claim: Claim) -> ReplicaBeat:
    load = LoadReport(0, 0, 0, 0)
    return ReplicaBeat(
        1, claim.incarnation, 0, 0, ReplicaStatus.READY, 1, load, Residency(), "base", "class", 1, 0
    )  # fmt: skip


async def test_a_dead_replica_is_buried_before_its_place_is_taken(settings: KafkaSettings) -> None:
    seen: Holders[ReplicaBeat] = Holders()
    async with replica(settings, seen) as (dead, writer):
        first = await take(dead, writer)
        await writer.send(REPLICAS, beat(first), key="1")
        async with replica(settings, Holders()) as (heir, heirs_writer):
            assert not seen.free(1)
            await heir.bury(heirs_writer)
            async with asyncio.timeout(5):
                while not seen.free(1):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            word = seen.get(1)
            assert word is not None
            assert word.beat is not None
            assert (word.incarnation, word.beat.reason) == (first.incarnation, "died")
            assert (await take(heir, heirs_writer)).incarnation > first.incarnation


async def test_who_was_buried_alive_stops(settings: KafkaSettings) -> None:
    async with replica(settings, Holders()) as (alive, writer):
        first = await take(alive, writer)
        await writer.send(REPLICAS, beat(first), key="1")
        watch = asyncio.create_task(alive.watch())
        async with replica(settings, Holders()) as (heir, heirs_writer):
            await heir.bury(heirs_writer)
            with pytest.raises(ReplacedError, match=f"{first.incarnation} was taken for dead"):
                async with asyncio.timeout(5):
                    await watch


async def test_there_may_be_nobody_to_bury(settings: KafkaSettings) -> None:
    seen: Holders[ReplicaBeat] = Holders()
    async with replica(settings, seen) as (heir, writer):
        await heir.bury(writer)
        await take(heir, writer)
        assert seen.get(1) is not None
        assert not seen.free(1)
