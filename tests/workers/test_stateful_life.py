"""Random walks over the life of adapters in one worker: the real loader, tiers, slots, leases, engine and book-keeping.

The store is a folder that fails, lies, breaks off and stands still when told to; the engine is the real one with a
runner that reads the real images; what they say to each other is delivered late and in pieces. Moves: admit, cancel,
load, unload, drain, retire and bring back, a store that fails, steps, ticks. After every move:

- no lease of a file without a live holder, none of a slot without a running sequence, and none missing;
- the bytes that a tier counts are those of its entries, and never above its budget;
- what is written into a slot, or cleared out of it, was leased by nobody, and every row computes with its own content;
- a slot's epoch never falls, and rises whenever its content changes;
- at most one fetch of an adapter is on its way;
- what the worker believes is in slots is what the engine has, once all words are delivered;
- a retired adapter, and one that is drained, takes no new attempt; DONE to an unload means that it was in no slot.

At the end of each walk: every attempt has ended once, every load and unload that was waited for was told its end, what
was retired has left its slot, nothing is leased, each tier's files are its entries; and when all is unloaded, no byte
is left on the GPU, nor, when the loader has stopped, in shared memory.
"""

import asyncio
import collections
import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from schemas.adapters import AdapterRecord
from schemas.engine import Command, Event, LoadSlot, SlotLoaded, Step
from schemas.reasons import AdapterStatus, FinishReason, RejectReason, Tier
from schemas.replicas import Answered, FailedLoad
from schemas.requests import Cancel, Sampling, Submit
from streams.adapters.locations import Location, parse_location
from streams.adapters.store import NotFound, Stream, Unavailable
from tests.streams.adapters.files import BASE_HASH, TINY
from tests.workers.engine.tiny import NeverMerged
from tests.workers.loader.rig import IMAGE, RANK, Gate, Rig
from workers import audit
from workers.engine.engine import Engine
from workers.engine.runner import Model, Opened, Stamps
from workers.engine.scheduler import Limits, Outcome, Row, Scheduler
from workers.engine.slots import Lease, Slots
from workers.inbox import Admit, Inbox, Reject, Stop
from workers.loading import Loading
from workers.sequences import Sequences
from workers.slot_image import open_image
from workers.unloading import Unloading

SEEDS, MOVES = 6, 700
ADAPTERS, SLOTS, IN_RAM, ON_DISK = 7, 2, 3, 4
MOST_OPEN, MOST_ASKED = 12, 6


class Narrow(Gate):
    """Counts the answers on their way of each object."""

    def __init__(self, root: Location) -> None:
        super().__init__(root)
        self.now: collections.Counter[str] = collections.Counter()
        self.twice: list[str] = []
        self._narrow = threading.Lock()

    @contextlib.contextmanager
    def stream(self, location: Location, limit_bytes: int, start: int = 0) -> Iterator[Stream]:
        with self._narrow:
            self.now[str(location)] += 1
            if self.now[str(location)] > 1:
                self.twice.append(str(location))
        try:
            with super().stream(location, limit_bytes, start) as stream:
                yield stream
        finally:
            with self._narrow:
                self.now[str(location)] -= 1


class Reading(NeverMerged):
    """A runner that reads images and knows who leases the slot that it is told to overwrite."""

    def __init__(self) -> None:
        self.model = Model(BASE_HASH, "reading", 10_000, 10)
        self.stamps, self.slots = Stamps(), Slots(SLOTS)

    def open(self, content_id: str, path: Path) -> Opened:
        image = open_image(path, content_id, TINY, RANK)

        def copy(filling: Lease) -> int:
            self._idle(filling.slot)
            memory = np.empty(image.payload_bytes, np.uint8)
            image.copy_to(memory)
            assert memory.any()
            self.stamps.write(filling)
            return image.payload_bytes

        return Opened(0, copy)

    def clear(self, slot: int) -> None:
        self._idle(slot)
        self.stamps.erase(slot)

    def run(self, rows: Sequence[Row]) -> list[Outcome]:
        for row in rows:
            assert self.stamps.mismatch(row) == ""
        return [1 if row.samples else None for row in rows]

    def _idle(self, slot: int) -> None:
        assert not self.slots._slots[slot - 1].leases, f"slot {slot} is overwritten while it is leased"


class Walk:
    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig, self.draw = rig, random.Random(seed)
        rig.store = self.store = Narrow(parse_location(f"file://{rig.remote}"))
        self.records = {r.adapter_id: r for r in (rig.adapter(n) for n in range(ADAPTERS))}
        self.runner = Reading()
        self.slots = self.runner.slots
        self.scheduler = Scheduler(Limits(10, 10_000, 4096, 6, 24), self.slots)
        self.commands: collections.deque[Command] = collections.deque()
        self.events: collections.deque[Event] = collections.deque()
        self.engine = Engine(self.scheduler, self.slots, self.runner, self.events.append, lambda: 0.0)
        self.sequences = Sequences(3, 7)
        self.inbox = Inbox(7, BASE_HASH, 10_000, MOST_OPEN, self.records.get, lambda *_: False)
        self.open: set[str] = set()
        self.admitted: collections.Counter[str] = collections.Counter()
        self.ends: collections.Counter[FinishReason] = collections.Counter()
        self.asked: list[asyncio.Task[None]] = []
        self.told: collections.Counter[str] = collections.Counter()
        self.epochs: dict[int, tuple[int, str]] = {}
        self.ever_loaded: set[str] = set()
        self.states: set[object] = set()
        self.moves = self.refused = 0

    def send(self, command: Command) -> None:
        self.commands.append(command)

    def by_content(self, content_id: str) -> AdapterRecord | None:
        return next((r for r in self.records.values() if r.content_id == content_id), None)

    def retired(self, content_id: str) -> bool:
        record = self.by_content(content_id)
        return record is not None and record.status is AdapterStatus.RETIRED

    async def begin(self) -> None:
        size = next(iter(self.records.values())).size_bytes
        self.loader = await self.rig.loader(disk=ON_DISK * size, ram=IN_RAM * IMAGE)
        self.loading = Loading(self, self.loader, self.rig.events.append, 3, 7, self.by_content)
        self.unloading = Unloading(self.loading, self.sequences.users)
        self.inbox.closed = self.unloading.closed
        self._running = asyncio.create_task(self.loading.run())

    async def move(self) -> None:
        draw, record = self.draw, self.records[self.draw.choice(list(self.records))]
        self.moves += 1
        match draw.choices(
            ("admit", "cancel", "load", "unload", "drain", "retire", "store", "engine", "hear", "rest"),
            (16, 4, 4, 4, 2, 3, 4, 30, 30, 16),
        )[0]:
            case "admit" if len(self.open) < MOST_OPEN:
                self.admit(record)
            case "cancel" if self.open:
                self.act(self.inbox.read(Cancel(draw.choice(sorted(self.open)), 0, 1, 1), 0.0))
            case "load" if len(self.asked) < MOST_ASKED and record.status is AdapterStatus.READY:
                self.asked.append(asyncio.create_task(self.load(record)))
            case "unload" | "drain" as how if len(self.asked) < MOST_ASKED:
                self.asked.append(asyncio.create_task(self.unload(record, 1e6 if how == "drain" else 0.0)))
            case "retire":
                ready = record.status is AdapterStatus.READY and draw.random() < 0.5
                status = AdapterStatus.RETIRED if ready else AdapterStatus.READY
                self.records[record.adapter_id] = msgspec.structs.replace(record, status=status)
            case "store":
                self.trouble()
            case "engine":
                self.step()
            case "hear":
                for _ in range(draw.randint(1, 4)):
                    self.hear()
            case _:
                if draw.random() < 0.2:  # a task, for it waits for the engine, which moves only when it is moved here
                    self.asked.append(asyncio.create_task(self.unloading.sweep(self.retired)))
                await asyncio.sleep(draw.choice((0, 0.001, 0.004)))
        self.check()

    def trouble(self) -> None:
        match self.draw.randint(0, 4):
            case 0:
                self.store.open.clear()
            case 1:
                self.store.failures.append(NotFound("it is not there"))
            case 2:
                self.store.failures.append(Unavailable("away"))
            case 3:
                self.store.says.append(b"lies")
            case _:
                self.store.breaks.append(100)
        if self.draw.random() < 0.7:
            self.store.open.set()

    def admit(self, record: AdapterRecord) -> None:
        name = f"r{self.admitted.total()}.{self.moves}"
        submit = Submit(
            name, 0, "acme", record.adapter_id, record.content_id, BASE_HASH, 3, 7, 1, 1, [1, 2, 3], [],
            self.draw.randint(1, 12), Sampling(1), [], 10**9,
        )  # fmt: skip
        closed = self.unloading.closed(record.content_id)
        acts = self.inbox.read(submit, 0.0)
        for act in acts:
            if isinstance(act, Reject):
                self.refused += 1
                assert act.reason in (RejectReason.RETIRED, RejectReason.DRAINING), act
            else:
                assert isinstance(act, Admit)
                assert record.status is AdapterStatus.READY
                assert not closed, "a new attempt came into a drain"
                self.open.add(name)
                self.admitted[name] += 1
        self.act(acts)

    def act(self, acts: Sequence[object]) -> None:
        for act in acts:
            match act:
                case Admit(adapter=record) if record is not None:
                    start, _ = self.sequences.admit(act, self.loading.tier(record), 0.0)
                    self.loading.residency.use(record.content_id)
                    self.send(start)
                case Stop():
                    if (cancel := self.sequences.stop(act)) is not None:
                        self.send(cancel)

    async def load(self, record: AdapterRecord) -> None:
        failure = await self.loading.loaded(record)
        assert isinstance(failure, FailedLoad) or record.content_id in self.ever_loaded
        self.told["failed" if failure else "loaded"] += 1

    async def unload(self, record: AdapterRecord, drain_s: float) -> None:
        outcome, reason = await self.unloading.unload(record, drain_s)
        if outcome is Answered.DONE:
            assert record.content_id not in self.loading.residency.contents()
        if outcome is Answered.IN_USE:
            assert not drain_s
            assert reason
        self.told[outcome] += 1

    def step(self) -> None:
        for _ in range(self.draw.randint(0, 4)):
            if self.commands:
                self.engine.handle(self.commands.popleft())
        self.engine.step()

    def hear(self) -> None:
        if not self.events:
            return
        match event := self.events.popleft():
            case Step():
                _, ended = self.sequences.step(event, 0.0)
                for row in ended:
                    assert row.reason is not FinishReason.ERROR, "a row failed"
                    self.open.remove(row.request_id)  # KeyError: it ended twice
                    self.ends[row.reason] += 1
                    self.inbox.finished(row.request_id, row.attempt)
            case _:
                if isinstance(event, SlotLoaded):
                    self.ever_loaded.add(event.content_id)
                    self.sequences.loaded(event.content_id, 0.0)
                if hasattr(event, "content_id"):
                    self.loading.event(event)  # type: ignore[arg-type]

    def check(self) -> None:
        loader, slots = self.loader, self.slots
        for tier, shelf in ((Tier.DISK, loader.disk), (Tier.RAM, loader.ram)):
            assert not list(audit.of_files(tier, shelf.leases(), loader.live()))
            assert shelf.used_bytes == sum(entry.bytes for entry in shelf._entries.values()) <= shelf.budget_bytes
        running = {seq: s.content_id for seq, s in self.scheduler._running.items() if s.content_id}
        assert slots.leases() == running, "leases are not the running sequences"
        for slot in slots._slots:
            epoch, content = self.epochs.get(slot.index, (0, ""))
            assert slot.epoch >= epoch
            assert slot.epoch > epoch or slot.content_id == content, "another content under the same epoch"
            self.epochs[slot.index] = (slot.epoch, slot.content_id)
        assert not self.store.twice, "two fetches of one adapter at once"
        if not self.events:
            assert set(self.loading.residency.contents()) == set(slots.contents())
        waiting_loads = sum(isinstance(command, LoadSlot) for command in self.commands)
        self.states.add(
            (
                tuple(sorted((s.content_id[:4], len(s.leases)) for s in slots._slots)),
                tuple(loader.ram.names()), tuple(loader.disk.names()), loader.on_their_way,
                waiting_loads, len(self.open), len(self.asked),
            )
        )  # fmt: skip
        self.asked = [task for task in self.asked if not _ended(task)]

    async def finish(self) -> None:
        """Nothing new comes, nothing fails any more."""
        self.store.open.set()
        for list_ in (self.store.failures, self.store.says, self.store.breaks):
            list_.clear()
        async with asyncio.timeout(60):
            while self.open or self.asked or self.commands or self.events or self.loader.on_their_way:
                self.step()
                while self.events:
                    self.hear()
                self.check()
                await asyncio.sleep(0.001)
            await self.driven(self.unloading.sweep(self.retired))
        contents = self.slots.contents()
        assert not [c for c in contents if self.retired(c)], "a retired adapter stays in its slot"
        assert self.slots.leased == 0
        assert not self.loader.disk.leases()
        assert not self.loader.ram.leases()
        assert not any((self.loading._loads, self.loading._slots, self.loading._leaving))
        assert self.rig.on_disk() == sorted(f"{name}.safetensors" for name in self.loader.disk.names())
        assert self.rig.in_memory() == sorted(self.loader.ram.names())
        async with asyncio.timeout(60):
            for content in contents:
                record = self.by_content(content)
                assert record is not None
                await self.driven(self.unloading.unload(record, 0.0))
        assert (self.loading.residency.bytes, self.slots.contents()) == (0, {})
        self._running.cancel()
        await asyncio.wait({self._running})
        await self.loader.stop()
        assert self.rig.in_memory() == []

    async def driven(self, work: object) -> None:
        """Carries it out, with an engine that goes on."""
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        while not task.done():
            self.step()
            while self.events:
                self.hear()
            await asyncio.sleep(0)
        task.result()


def _ended(task: asyncio.Task[None]) -> bool:
    if task.done():
        task.result()
    return task.done()


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_any_life(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.loader.backoff.FIRST_S", 0.002)
    monkeypatch.setattr("workers.loader.backoff.LONGEST_S", 0.01)
    monkeypatch.setattr("workers.unloading.LOOK_S", 0.001)
    rig = Rig(tmp_path)
    walk = Walk(rig, seed)
    try:
        await walk.begin()
        for _ in range(MOVES):
            await walk.move()
        await walk.finish()
    finally:
        walk.store.open.set()
        await rig.close()
    events = collections.Counter((event.event, event.tier) for event in rig.events)
    print(
        f"seed {seed}: {walk.moves} moves, {len(walk.states)} states, {walk.admitted.total()} attempts "
        f"({dict(walk.ends)}), {walk.refused} refused, commands {dict(walk.told)}, {walk.store.fetches} fetches, "
        f"events { {f'{kind} {tier}': n for (kind, tier), n in events.items()} }"
    )
    # The walk has met what it is for.
    assert min(events["evict", tier] for tier in (Tier.GPU, Tier.RAM, Tier.DISK)) > 0
    assert min(walk.ends[FinishReason.LENGTH], walk.ends[FinishReason.CANCELLED], walk.refused) > 0
    assert walk.told.keys() >= {"loaded", Answered.DONE, Answered.NOT_THERE, Answered.IN_USE}
