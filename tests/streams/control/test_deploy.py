"""Deploys on a real Kafka: warmed on every owner, then moved, then the old version leaves; through kill -9."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from schemas.adapters import AliasRecord, RollbackAlias, SetAlias
from schemas.placement import Load
from schemas.reasons import Outcome
from schemas.replicas import Answer, Answered
from schemas.topics import FINISHED
from tests.gateway.rig import until
from tests.streams.control.process import Fleet
from tests.streams.control.replicas import Replica
from tests.streams.sink.samples import request

pytestmark = pytest.mark.real
ONE, TWO, PROD = "acme/support@1", "acme/support@2", "acme/support:prod"


@pytest.fixture
async def fleet(kafka: str, namespace: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(kafka, namespace, tmp_path).connected() as fleet:
        yield fleet


@pytest.fixture
async def replicas(fleet: Fleet) -> AsyncIterator[list[Replica]]:
    """Two of them, which both own everything."""
    one, two = (Replica(place, fleet.base_hash) for place in range(2))
    async with one.lives(fleet.settings, fleet.writer), two.lives(fleet.settings, fleet.writer):
        yield [one, two]


async def begin(fleet: Fleet, *dying: str) -> None:
    """Two versions, the alias at the first; `dying`: of the registry from then on."""
    fleet.start(CONTROL_FLIP_LIMIT_S="4")
    await fleet.ready()
    for version, adapter_id in enumerate((ONE, TWO)):
        made = await fleet.ask(fleet.upload(f"r{version}", seed=version, adapter_id=adapter_id))
        assert made.status == 201
    assert (await fleet.ask(SetAlias("first", PROD, ONE))).status == 201
    if dying:
        fleet.kill()
        fleet.start(dying, CONTROL_FLIP_LIMIT_S="60")
        await fleet.ready()


def row(fleet: Fleet) -> AliasRecord:
    found = fleet.aliases.get(PROD)
    assert found is not None
    return found


async def test_warmed_on_both_owners_then_moved_then_the_old_one_leaves(fleet: Fleet, replicas: list[Replica]) -> None:
    await begin(fleet)
    for replica in replicas:
        replica.slots.append(ONE)
    replicas[1].stuck = True
    await fleet.send(SetAlias("deploy", PROD, TWO, "acme pipeline lf-1"))
    await until(lambda: TWO in replicas[0].slots and bool(replicas[1].wishes), 20, "loads")
    await asyncio.sleep(0.7)
    assert (row(fleet).adapter_id, [result.status for result in fleet.results["deploy"]]) == (ONE, [202])
    replicas[1].slots.append(TWO)
    done = await fleet.result("deploy", 2)
    assert (done.status, done.adapter_id, done.previous_adapter_id) == (200, TWO, ONE)
    await fleet.row(done)
    assert (row(fleet).adapter_id, row(fleet).pending) == (TWO, None)
    await until(lambda: all(ONE not in replica.slots for replica in replicas), 20, "the old one leaves")
    events = [event for event in await fleet.history(5) if event.command_id == "deploy"]
    assert [(event.kind, event.by) for event in events] == [
        ("warming", "acme pipeline lf-1"), ("moved", "acme pipeline lf-1"),
    ]  # fmt: skip


async def test_what_does_not_get_warm_in_time_stays_and_a_rollback_moves_cold(
    fleet: Fleet, replicas: list[Replica]
) -> None:
    await begin(fleet)
    replicas[0].stuck = replicas[1].stuck = True
    await fleet.send(SetAlias("deploy", PROD, TWO))
    failed = await fleet.result("deploy", 2)
    assert failed.status == 504
    assert "have not loaded acme/support@2 in time" in failed.refusals[0].message
    assert sum(isinstance(wish, Load) for wish in replicas[0].wishes) >= 2  # asked again meanwhile
    await fleet.row(failed)
    assert (row(fleet).adapter_id, row(fleet).pending) == (ONE, None)
    replicas[0].stuck = replicas[1].stuck = False
    await fleet.send(SetAlias("again", PROD, TWO))
    assert (await fleet.result("again", 2)).status == 200
    replicas[0].stuck = replicas[1].stuck = True
    for replica in replicas:
        replica.slots.clear()
    await fleet.send(RollbackAlias("back", PROD))
    assert (await fleet.result("back", 2)).adapter_id == ONE


async def test_what_an_owner_can_never_load_ends_at_once_and_what_may_pass_is_waited_for(
    fleet: Fleet, replicas: list[Replica]
) -> None:
    fleet.start(CONTROL_FLIP_LIMIT_S="600")
    await fleet.ready()
    for version, adapter_id in enumerate((ONE, TWO)):
        assert (await fleet.ask(fleet.upload(f"r{version}", seed=version, adapter_id=adapter_id))).status == 201
    assert (await fleet.ask(SetAlias("first", PROD, ONE))).status == 201
    replicas[0].fails = Answer("", Answered.FAILED, "its file is torn", lasting=True)
    await fleet.send(SetAlias("deploy", PROD, TWO))
    failed = await fleet.result("deploy", 2)
    assert failed.status == 504
    assert "replica 0 cannot load acme/support@2: its file is torn" in failed.refusals[0].message
    await fleet.row(failed)
    assert (row(fleet).adapter_id, row(fleet).pending) == (ONE, None)
    replicas[0].fails = Answer("", Answered.FAILED, "the store is away")
    await fleet.send(SetAlias("again", PROD, TWO))
    await until(lambda: len(replicas[0].answers) > 2, 20, "asked again, though it could not")
    replicas[0].fails = None
    assert (await fleet.result("again", 2)).status == 200


async def test_a_later_command_replaces_it_and_the_first_caller_is_told(fleet: Fleet, replicas: list[Replica]) -> None:
    await begin(fleet)
    replicas[0].stuck = True
    await fleet.send(SetAlias("deploy", PROD, TWO))
    assert (await fleet.result("deploy")).status == 202
    assert (await fleet.ask(RollbackAlias("off", PROD))).status == 200
    told = await fleet.result("deploy", 2)
    assert (told.status, "off came before acme/support@2 was warm" in told.refusals[0].message) == (409, True)
    await fleet.tables.barrier()
    assert (row(fleet).adapter_id, row(fleet).pending) == (ONE, None)


async def test_without_replicas_it_does_not_hang(fleet: Fleet) -> None:
    await begin(fleet)
    await fleet.send(SetAlias("deploy", PROD, TWO))
    assert (await fleet.result("deploy", 2)).status == 200


async def test_a_trial_that_fails_ends_by_itself_and_leaves_its_slots(fleet: Fleet, replicas: list[Replica]) -> None:
    await begin(fleet)
    await fleet.send(SetAlias("try", PROD, TWO, share=0.25))
    begun = await fleet.result("try", 2)
    assert (begun.status, begun.adapter_id, begun.trial_adapter_id, begun.trial_share) == (200, ONE, TWO, 0.25)
    await fleet.row(begun)
    assert all(TWO in replica.slots for replica in replicas)
    for number in range(4):
        failed = msgspec.structs.replace(
            request(number), request_id=f"r{number}", model=PROD, adapter=TWO, outcome=Outcome.FAILED
        )
        await fleet.writer.send(FINISHED, failed, key="acme")
    await until(lambda: row(fleet).trial is None, 20, "its end")
    assert row(fleet).adapter_id == ONE
    await until(lambda: all(TWO not in replica.slots for replica in replicas), 20, "it leaves")
    kinds = [event.kind for event in await fleet.history(6)]
    assert kinds[-3:] == ["warming", "tried", "kept"]


# The registry writes: the row with the flip, its event, its result; the conclusion; the row that moves, its event.
WRITES = [
    ("adapter-results", "after", "1"),
    ("adapter-commands", "after", "1"),
    ("aliases", "before", "2"),
    ("adapter-events", "before", "2"),
]


@pytest.mark.parametrize("dying", WRITES, ids="-".join)
async def test_killed_anywhere_it_is_carried_out_once(
    fleet: Fleet, replicas: list[Replica], dying: tuple[str, str, str]
) -> None:
    await begin(fleet, *dying)
    await fleet.send(SetAlias("deploy", PROD, TWO))
    await asyncio.to_thread(fleet.process.wait, 30)
    fleet.kill()
    fleet.start(CONTROL_FLIP_LIMIT_S="60")
    await fleet.ready()
    await until(lambda: row(fleet).adapter_id == TWO and row(fleet).pending is None, 30, "it moves")
    await until(lambda: [result.status for result in fleet.results["deploy"]][-1] == 200, 20, "its result")
    assert row(fleet).commands == ["first", "deploy"]
    kinds = [event.kind for event in await fleet.history(5) if event.command_id == "deploy"]
    assert kinds == ["warming", "moved"]
