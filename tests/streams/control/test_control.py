"""The control process on a real Kafka: commands in, records and results out, through kills and outages."""

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from infra.local.child import Child
from infra.local.kafka import Kafka
from infra.local.store import Store
from schemas.adapters import RetireAdapter, RollbackAlias, SetAlias
from schemas.reasons import AdapterStatus
from schemas.topics import ADAPTER_COMMANDS
from tests.gateway.rig import until
from tests.stack import Stack, started, wait_until
from tests.streams.adapters.files import config, read_back, tensors, write
from tests.streams.control.process import Fleet

pytestmark = pytest.mark.real


@pytest.fixture
async def fleet(kafka: str, namespace: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(kafka, namespace, tmp_path).connected() as fleet:
        yield fleet


async def test_the_life_of_an_adapter(fleet: Fleet) -> None:
    fleet.start()
    await fleet.ready()
    one = await fleet.ask(fleet.upload("one"))
    assert (one.status, one.adapter_id) == (201, "acme/support@7")
    await fleet.row(one)
    row = fleet.adapters.get("acme/support@7")
    assert row is not None
    assert row.content_id == one.content_id
    stored = Path(row.weights_uri.removeprefix("file://"))
    assert len(read_back(stored, row.content_id, fleet.base_hash)) == 21

    again = await fleet.ask(fleet.upload("again"))
    assert (again.status, again.content_id) == (200, one.content_id)
    other = await fleet.ask(fleet.upload("other", seed=9))
    assert (other.status, [reason.field for reason in other.refusals]) == (409, ["adapter_id"])
    two = await fleet.ask(fleet.upload("two", seed=2, adapter_id="acme/support@8"))
    assert two.status == 201

    alias = "acme/support:prod"
    assert (await fleet.ask(SetAlias("a1", alias, "acme/support@7"))).status == 201
    assert (await fleet.ask(RetireAdapter("r1", "acme/support@7"))).status == 409
    moved = await fleet.ask(SetAlias("a2", alias, "acme/support@8"))
    assert (moved.status, moved.previous_adapter_id) == (200, "acme/support@7")
    await fleet.row(moved)
    found = fleet.aliases.get(alias)
    assert found is not None
    assert (found.adapter_id, found.previous_adapter_id) == ("acme/support@8", "acme/support@7")
    assert (await fleet.ask(RollbackAlias("b1", alias))).adapter_id == "acme/support@7"
    assert (await fleet.ask(RollbackAlias("b2", alias))).adapter_id == "acme/support@8"
    retired = await fleet.ask(RetireAdapter("r2", "acme/support@7"))
    assert retired.status == 200
    await fleet.row(retired)
    row = fleet.adapters.get("acme/support@7")
    assert row is not None
    assert row.status is AdapterStatus.RETIRED
    assert (await fleet.ask(SetAlias("a3", alias, "acme/support@7"))).status == 409
    assert (await fleet.ask(SetAlias("a4", alias, "acme/support@99"))).status == 404
    assert (await fleet.ask(RollbackAlias("b3", alias))).status == 409
    assert fleet.stop() < 10


async def test_refusals_carry_every_reason_and_leave_the_id_free(fleet: Fleet) -> None:
    fleet.start()
    await fleet.ready()
    bad = fleet.upload("bad", told=config(use_dora=True, bias="all"), rank=99, base_model_hash="x" * 64)
    result = await fleet.ask(bad)
    assert result.status == 422
    assert {reason.field for reason in result.refusals} == {
        "rank", "base_model_hash", "adapter_config.use_dora", "adapter_config.bias",
    }  # fmt: skip
    assert (await fleet.ask(fleet.upload("keyed"), key="globex")).refusals[0].field == "key"
    assert (await fleet.ask(SetAlias("foreign", "globex/x:prod", "acme/support@7"))).status == 422
    assert {r.field for r in (await fleet.ask(SetAlias("names", "x", "y"))).refusals} == {"alias", "adapter_id"}
    events = {event.command_id: event for event in await fleet.history(2)}
    assert set(events) == {"bad", "foreign"}  # of a record with another customer's key, nobody's history says anything
    assert (events["bad"].kind, events["bad"].adapter_id, events["bad"].status) == ("refused", "acme/support@7", 422)
    assert events["bad"].reasons == result.refusals
    await fleet.tables.barrier()
    assert not len(fleet.adapters)
    assert not list(fleet.store.iterdir())
    assert not list((fleet.folder / "home" / "control-0").iterdir())
    assert (await fleet.ask(fleet.upload("good"))).status == 201


async def test_records_that_are_no_commands(fleet: Fleet) -> None:
    """Whatever a pipeline writes, the one behind it is served."""
    fleet.start()
    await fleet.ready()
    producer = AIOKafkaProducer(bootstrap_servers=fleet.settings.bootstrap_servers)
    await producer.start()
    try:
        for raw in (
            b"",
            b"\xff\x00",
            b"[]",
            b'{"type": "register"}',
            b'{"command_id": "odd", "type": "register", "x": 1}',
        ):
            await producer.send_and_wait(fleet.settings.topic_name(ADAPTER_COMMANDS), raw, key=b"acme", partition=0)
        await producer.send_and_wait(fleet.settings.topic_name(ADAPTER_COMMANDS), None, key=b"acme", partition=0)
        await producer.send_and_wait(fleet.settings.topic_name(ADAPTER_COMMANDS), b"{}", partition=0)
    finally:
        await producer.stop()
    odd = await fleet.result("odd")
    assert odd.status == 422
    assert {"adapter_id", "x", "checksum"} <= {reason.field for reason in odd.refusals}
    assert (await fleet.ask(fleet.upload("good"))).status == 201


async def test_many_customers_at_once(fleet: Fleet) -> None:
    fleet.start()
    await fleet.ready()
    for n in range(12):
        await fleet.make(f"customer-{n}")
    commands = [
        fleet.upload(f"c{n}v{version}", seed=100 * n + version, adapter_id=f"customer-{n}/support@{version}")
        for n in range(12)
        for version in (1, 2)
    ]
    await asyncio.gather(*(fleet.send(command) for command in commands))
    # Two registrations of one id with different content: the log decides, and one of them only.
    rivals = [fleet.upload(f"rival{n}", seed=500 + n, adapter_id="customer-0/support@3") for n in range(2)]
    await asyncio.gather(*(fleet.send(command) for command in rivals))
    results = [await fleet.result(command.command_id) for command in commands]
    assert {result.status for result in results} == {201}
    assert sorted([(await fleet.result(rival.command_id)).status for rival in rivals]) == [201, 409]
    await fleet.tables.barrier()
    assert len(fleet.adapters) == 25
    assert len({row.content_id for _, row in fleet.adapters.items()}) == 25


async def test_killed_between_its_steps_it_decides_each_command_once(fleet: Fleet) -> None:
    """kill -9 at ever later moments of a registration; the command is in the log, so it is answered in the end."""
    delays_s = [0.0, 0.006, 0.02, 0.06]
    fleet.start()
    await fleet.ready()
    for n, delay_s in enumerate(delays_s):
        command = fleet.upload(f"k{n}", seed=n, adapter_id=f"acme/support@{n + 1}")
        await fleet.send(command)
        await fleet.send(SetAlias(f"a{n}", "acme/support:prod", command.adapter_id))
        await asyncio.sleep(delay_s)
        fleet.kill()
        fleet.start()
        assert (await fleet.result(command.command_id)).status == 201
        last = 200 if n else 201
        told = fleet.results.setdefault(f"a{n}", [])
        await until(lambda told=told, last=last: [r.status for r in told][-1:] == [last], 45, "the alias")  # type: ignore[misc]
        await fleet.ready()
    await fleet.tables.barrier()
    assert {key: row.adapter_id for key, row in fleet.aliases.items()} == {"acme/support:prod": "acme/support@4"}
    assert len(fleet.adapters) == len(delays_s)
    ids = [[result.content_id for result in fleet.results[f"k{n}"]] for n in range(len(delays_s))]
    assert all(len(set(found)) == 1 for found in ids)
    # Answered before, and overtaken since: an alias that has moved on is not moved back.
    later = [result for n in range(len(delays_s)) for result in fleet.results[f"a{n}"][1:]]
    assert all(result.status in (200, 201, 202) or result.refusals[0].field == "command_id" for result in later)
    files = [path for path in fleet.store.rglob("*") if path.is_file()]
    assert len([path for path in files if path.suffix == ".safetensors"]) == len(delays_s)


@pytest.mark.parametrize("dying", [("aliases", "before"), ("adapter-events", "before")], ids="-".join)
async def test_killed_at_a_write_it_writes_each_once(fleet: Fleet, dying: tuple[str, str]) -> None:
    """One move, one event, one answer: whichever write the registry died at."""
    fleet.start()
    await fleet.ready()
    assert (await fleet.ask(fleet.upload("one"))).status == 201
    fleet.kill()
    fleet.start(dying)
    await fleet.ready()
    await fleet.send(SetAlias("move", "acme/support:prod", "acme/support@7"))
    await asyncio.to_thread(fleet.process.wait, 30)
    fleet.kill()
    fleet.start()
    await fleet.ready()
    assert (await fleet.ask(SetAlias("same", "acme/support:prod", "acme/support@7"))).status == 200
    assert {result.status for result in fleet.results["move"]} == {201}
    await fleet.tables.barrier()
    row = fleet.aliases.get("acme/support:prod")
    assert row is not None
    assert (row.adapter_id, row.commands) == ("acme/support@7", ["move"])
    registered, moved = await fleet.history(2)
    assert (registered.kind, registered.command_id, registered.by) == ("registered", "one", "topic")
    assert (moved.kind, moved.command_id, moved.at_unix_ms) == ("moved", "move", row.updated_unix_ms)


async def test_a_command_written_while_nobody_runs_is_not_lost(fleet: Fleet) -> None:
    await fleet.send(fleet.upload("early"))
    fleet.start()
    assert (await fleet.result("early")).status == 201


async def test_a_source_that_is_away_is_503(fleet: Fleet) -> None:
    fleet.start(LORAFLEET_SOURCES="s3://uploads", S3_ENDPOINT_URL="http://127.0.0.1:9")
    await fleet.ready()
    result = await fleet.ask(fleet.upload("early", weights_uri="s3://uploads/acme/a.safetensors"))
    assert (result.status, [reason.field for reason in result.refusals]) == (503, ["weights_uri"])
    await fleet.tables.barrier()
    assert not len(fleet.adapters)


async def test_a_source_folder_that_is_not_there_is_422_at_once(fleet: Fleet) -> None:
    fleet.start()
    await fleet.ready()
    command = fleet.upload("early")
    fleet.inbox.rename(fleet.folder / "elsewhere")
    began = time.monotonic()
    result = await fleet.ask(command)
    assert time.monotonic() - began < 5
    assert (result.status, {reason.field for reason in result.refusals}) == (422, {"weights_uri", "adapter_config"})
    assert all(command.weights_uri.rpartition("/")[0] in reason.message for reason in result.refusals)
    (fleet.folder / "elsewhere").rename(fleet.inbox)
    assert (await fleet.ask(fleet.upload("later"))).status == 201


async def test_an_adapter_of_a_customer_that_was_never_made_is_422(fleet: Fleet) -> None:
    fleet.start()
    await fleet.ready()
    result = await fleet.ask(fleet.upload("early", adapter_id="umbrella/support@1"))
    assert (result.status, [reason.field for reason in result.refusals]) == (422, ["adapter_id"])
    assert "no customer umbrella; PUT /internal/customers/umbrella makes it" in result.refusals[0].message
    assert not list(fleet.store.iterdir())
    await fleet.make("umbrella")
    assert (await fleet.ask(fleet.upload("later", adapter_id="umbrella/support@1"))).status == 201


async def test_a_store_that_comes_back_in_time_is_not_noticed(fleet: Fleet) -> None:
    fleet.start()
    await fleet.ready()
    fleet.store.rmdir()
    fleet.store.touch()  # nothing can be written below a file
    await fleet.send(fleet.upload("patient"))
    await asyncio.sleep(1)
    assert "patient" not in fleet.results
    fleet.store.unlink()
    fleet.store.mkdir()
    assert (await fleet.result("patient")).status == 201


async def test_through_s3(fleet: Fleet, store: Store, tmp_path: Path) -> None:
    fleet.start(
        LORAFLEET_STORE=f"s3://adapters/{fleet.settings.namespace}",
        LORAFLEET_SOURCES=f"s3://uploads/{fleet.settings.namespace}",
        S3_ENDPOINT_URL=store.endpoint,
        AWS_ACCESS_KEY_ID=store.access_key,
        AWS_SECRET_ACCESS_KEY=store.secret_key,
    )
    path, checksum = write(tmp_path / "files", tensors(), config())
    prefix = f"{fleet.settings.namespace}/acme"
    for name in (path.name, "adapter_config.json"):
        store.client().fput_object("uploads", f"{prefix}/{name}", str(path.parent / name))
    command = fleet.upload("s3", weights_uri=f"s3://uploads/{prefix}/{path.name}", checksum=checksum)
    await fleet.ready()
    result = await fleet.ask(command)
    assert (result.status, result.refusals) == (201, [])
    await fleet.row(result)
    row = fleet.adapters.get("acme/support@7")
    assert row is not None
    bucket, _, key = row.weights_uri.removeprefix("s3://").partition("/")
    told: Any = store.client().stat_object(bucket, key)
    assert (told.size, told.metadata["x-amz-meta-sha256"]) == (row.size_bytes, row.checksum)
    other = fleet.upload("other", weights_uri=f"s3://adapters/{prefix}/{path.name}", adapter_id="acme/support@9")
    refused = await fleet.ask(other)
    assert (refused.status, {reason.field for reason in refused.refusals}) == (422, {"weights_uri"})
    gone = fleet.upload("gone", weights_uri=f"s3://uploads/{prefix}/gone.safetensors", adapter_id="acme/support@9")
    assert {reason.field for reason in (await fleet.ask(gone)).refusals} == {"weights_uri"}
    assert store.secret_key not in fleet.log()


async def test_a_second_instance_takes_over(fleet: Fleet) -> None:
    fleet.start()
    await fleet.ready()
    first = fleet.process
    assert (await fleet.ask(fleet.upload("one"))).status == 201
    home = fleet.folder / "home"
    fleet.start(CONTROL_INSTANCE="1")
    try:
        await fleet.ready()
        first.kill()
        first.wait(10)
        for n in range(6):
            await fleet.make(f"customer-{n}")
        results = [await fleet.ask(fleet.upload(f"n{n}", seed=n, adapter_id=f"customer-{n}/x@1")) for n in range(6)]
        assert {result.status for result in results} == {201}
        assert (await fleet.ask(fleet.upload("again"))).status == 200
    finally:
        if first.poll() is None:
            os.kill(first.pid, 9)
            first.wait(10)
        assert first.stdout is not None
        first.stdout.close()
    scratch = {f"control-{instance}{of}" for instance in (0, 1) for of in ("", "-faust")}
    assert {path.name for path in home.iterdir()} == scratch
    shutil.rmtree(home)


async def test_settings_that_cannot_work_end_it_with_one_line(fleet: Fleet) -> None:
    fleet.start(LORAFLEET_SOURCES="http://x")
    assert await asyncio.to_thread(fleet.process.wait, 30) == 1
    assert "LORAFLEET_SOURCES" in fleet.log().splitlines()[-1]
    assert "Traceback" not in fleet.log()


@pytest.fixture
def mortal(stack: Stack) -> Kafka:
    """A broker of this test's own, not started yet."""
    ports = stack.ports.allot("control-kafka"), stack.ports.allot("control-kafka-controller")
    return Kafka(stack.home / "control-kafka", *ports, log=stack.home / "control-kafka.log")


async def test_kafka_killed_and_back_it_goes_on_by_itself(
    stack: Stack, mortal: Kafka, namespace: str, tmp_path: Path
) -> None:
    broker = started(mortal)  # in the main thread: a child dies with the thread that started it
    try:
        async with Fleet(mortal.bootstrap, namespace, tmp_path).connected() as fleet:
            fleet.start()
            await fleet.ready()
            assert (await fleet.ask(fleet.upload("before"))).status == 201
            _kill(broker)
            await asyncio.sleep(1)
            broker = started(mortal)
            after = await fleet.ask(fleet.upload("after", seed=1, adapter_id="acme/support@8"))
            assert after.status == 201
            assert fleet.process.poll() is None
    finally:
        _kill(broker)


def _kill(child: Child) -> None:
    child.kill()
    wait_until(lambda: child.returncode() is not None, 10, "the broker's end")
