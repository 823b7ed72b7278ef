"""Warms what aliases are about to point at, concludes their flips, ends trials, takes old versions out of their slots.

Owns nothing that a crash could lose: what is pending or tried stands in the alias rows, and who has what in its slots
in the replicas' beats. (A version whose trial has just ended is the one thing that a new process does not know: it
leaves its slot when the place is needed.) Decides nothing either: that a flip or a trial is over is a command to the
registry, in the log, and is decided there (moves.py). So every control process may run one of these: commands and
conclusions that come twice do nothing. Ordering relied on: none.
A Load or an Unload is a wish, sent again until a beat shows that it is met. One answer matters: that a replica cannot
load the new version, nor ever will, ends the flip at once; what may pass is asked for again until the deadline. An old
version, which leaves a slot only after its last request, is wished away until it is in none, for DRAIN_S at most;
whoever asks for it by its id after that keeps it.
Without Kafka nothing is heard, listening time stands still, and the deadline decides when it is back.
"""

import asyncio
import logging
import time
import uuid
from typing import NoReturn

from schemas.adapters import AliasRecord, ConcludeFlip, EndTrial, PendingFlip, Trial
from schemas.placement import Load, OwnerPlan, Unload
from schemas.replicas import Answer, Answered, ReplicaState
from schemas.topics import ADAPTER_COMMANDS, OWNER_PLANS, REPLICA_COMMANDS, REPLICAS
from streams.bus.errors import BusUnavailable
from streams.bus.settings import KafkaSettings
from streams.bus.table import Change, Table, TableReader
from streams.bus.writer import Writer
from streams.control import warmup
from streams.control.registrar import Registrar
from streams.control.trials import Trials
from streams.placement.rendezvous import OWNERS
from streams.presence.replicas import Replicas

log = logging.getLogger(__name__)

LOOK_S = 0.05
AGAIN_S = 2.0
DRAIN_S = 120.0
REGISTRY = "registry"


class Deployer:
    """`reader` is started and stopped by whoever makes it; `registrar` is whose tables are read."""

    def __init__(self, settings: KafkaSettings, writer: Writer, base_hash: str) -> None:
        self._plans = Table[OwnerPlan](OWNER_PLANS)
        self._replicas = Replicas()
        replicas = Table[ReplicaState](REPLICAS, self._replicas.apply)
        self.reader = TableReader(settings, [self._plans, replicas], "deployer tables")
        self._writer, self._base_hash = writer, base_hash
        self._flips: dict[str, AliasRecord] = {}  # rows with a pending flip, by alias
        self._left: dict[str, int] = {}  # adapters that an alias has left -> when, in unix ms
        self.trials = Trials()
        self._asked: dict[tuple[str, ...], float] = {}  # when each wish was last sent, monotonic
        self._loads: dict[str, dict[str, int]] = {}  # Load commands by adapter: command id -> replica

    def note(self, change: Change[AliasRecord]) -> None:
        """A record of `aliases`."""
        self.trials.note_alias(change)
        self._flips.pop(change.key, None)
        if (row := change.value) is None:
            return
        if row.pending is not None:
            self._flips[row.alias] = row
        before = change.previous.ends if change.previous is not None else ()
        for adapter_id in {row.previous_adapter_id, *before} - {"", *row.ends}:
            self._left[adapter_id] = row.updated_unix_ms

    async def run(self, registrar: Registrar) -> NoReturn:
        """For ever."""
        await self.reader.caught_up()
        while True:
            now = time.monotonic()
            self._replicas.tick(now, self.reader.age(now))
            try:
                slots = self._slots()
                warming = {row.pending.adapter_id for row in self._flips.values() if row.pending is not None}
                self._loads = {adapter: asked for adapter, asked in self._loads.items() if adapter in warming}
                for row in list(self._flips.values()):
                    await self._advance(registrar, row, slots)
                if slots is not None:
                    for adapter_id in list(self._left):
                        await self._drain(registrar, adapter_id, slots)
                for row, trial, why in list(self.trials.failed(registrar.adapters)):
                    await self._end_trial(row, trial, why)
            except BusUnavailable as error:
                log.warning("tried again: %s", error)
            await asyncio.sleep(LOOK_S)

    async def _advance(self, registrar: Registrar, row: AliasRecord, slots: dict[int, list[str]] | None) -> None:
        flip = row.pending
        assert flip is not None
        failures = self._failures(flip.adapter_id)
        plan = self._plans.get(flip.adapter_id)
        owners = plan.owners if plan is not None else OWNERS
        now_unix_ms = time.time_ns() // 1_000_000
        match warmup.step(flip, registrar.adapters.get(flip.adapter_id), slots, now_unix_ms, owners, failures):
            case warmup.Load(places):
                for place in places:
                    if self._due("load", flip.adapter_id, str(place)):
                        command = Load(uuid.uuid4().hex, flip.adapter_id)
                        self._loads.setdefault(flip.adapter_id, {})[command.command_id] = place
                        await self._writer.send(REPLICA_COMMANDS, command, key=command.command_id, partition=place)
            case warmup.Conclude(warm, why):
                await self._conclude(row, flip, warm, why)

    async def _conclude(self, row: AliasRecord, flip: PendingFlip, warm: bool, why: str) -> None:
        if self._due("conclude", row.alias, flip.command_id):
            log.info("%s to %s: %s %s", row.alias, flip.adapter_id, "warm" if warm else "not warm", why)
            command = ConcludeFlip(uuid.uuid4().hex, row.alias, flip, warm, why, REGISTRY)
            await self._writer.send(ADAPTER_COMMANDS, command, key=row.customer)

    async def _end_trial(self, row: AliasRecord, trial: Trial, why: str) -> None:
        if self._due("end trial", row.alias, trial.command_id):
            log.error("%s: the trial of %s ends: %s", row.alias, trial.adapter_id, why)
            command = EndTrial(uuid.uuid4().hex, row.alias, trial, why, REGISTRY)
            await self._writer.send(ADAPTER_COMMANDS, command, key=row.customer)

    async def _drain(self, registrar: Registrar, old: str, slots: dict[int, list[str]]) -> None:
        too_late = time.time() - self._left[old] / 1000 > DRAIN_S
        if too_late or not any(old in held for held in slots.values()):
            del self._left[old]
            return
        if not self._due("unload", old):
            return
        in_use = {adapter for _, other in registrar.aliases.items() for adapter in other.ends}
        content = {
            adapter: found.content_id
            for adapter in in_use | {old}
            if (found := registrar.adapters.get(adapter)) is not None
        }
        for place in warmup.old_versions(old, slots, content, in_use):
            command = Unload(uuid.uuid4().hex, old)
            await self._writer.send(REPLICA_COMMANDS, command, key=command.command_id, partition=place)

    def _failures(self, adapter_id: str) -> dict[int, Answer]:
        """The replicas that could not load the adapter when they were last asked to by this process."""
        asked, found, beats = self._loads.get(adapter_id, {}), dict[int, Answer](), self._replicas.beats()
        for command_id, place in asked.items():
            for answer in beats[place].answers if place in beats else ():
                if answer.command_id == command_id and answer.outcome is Answered.FAILED:
                    found[place] = answer
        return found

    def _slots(self) -> dict[int, list[str]] | None:
        """What is in the slots of each replica that takes work. None until each one's fate is known."""
        if not self._replicas.heard:
            return None
        serving = self._replicas.serving(self._base_hash)
        return {place: beat.residency.gpu_adapters for place, beat in serving.items()}

    def _due(self, *wish: str) -> bool:
        """Whether the wish was not sent within the last AGAIN_S; notes that it is now."""
        now = time.monotonic()
        self._asked = {asked: at for asked, at in self._asked.items() if now - at < AGAIN_S}
        return self._asked.setdefault(wish, now) == now
