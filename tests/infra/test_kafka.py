"""The embedded broker: alive after kill -9 with all that it had acknowledged, and never two in one folder."""

import socket
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from infra.local.child import Child, ChildError
from infra.local.kafka import Kafka
from infra.local.ports import Ports
from tests.stack import started

pytestmark = pytest.mark.real


def broker(folder: Path) -> Kafka:
    ports = Ports(folder / "ports.json")
    return Kafka(folder / "kafka", ports.allot("kafka"), ports.allot("controller"), log=folder / "kafka.log")


async def send(bootstrap: str, topic: str, values: list[bytes]) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(topic, 1, 1)])
    await admin.close()
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all")
    await producer.start()
    for value in values:
        await producer.send_and_wait(topic, value, partition=0)
    await producer.stop()


async def received(bootstrap: str, topic: str, count: int) -> list[bytes]:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="none")
    await consumer.start()
    partition = TopicPartition(topic, 0)
    consumer.assign([partition])
    consumer.seek(partition, 0)
    values = [(await consumer.getone()).value for _ in range(count)]
    await consumer.stop()
    return values


async def test_killed_broker_comes_back_with_every_acknowledged_record_even_on_other_ports(tmp_path: Path) -> None:
    service = broker(tmp_path)
    first = started(service)
    sent = [f"{number}".encode() for number in range(300)]
    await send(service.bootstrap, "kept", sent)
    first.kill()
    first.stop()
    others = Ports(tmp_path / "others.json")
    moved = Kafka(tmp_path / "kafka", others.allot("kafka"), others.allot("controller"), log=tmp_path / "kafka.log")
    second = started(moved)
    try:
        assert moved.bootstrap != service.bootstrap
        assert await received(moved.bootstrap, "kept", len(sent)) == sent
        with pytest.raises(ChildError, match="in use by another process"):
            Child(service.prepare())  # a second one in a live folder
        assert moved.ready()
    finally:
        assert second.stop() in (0, 143)
    assert not moved.ready()


def test_missing_java_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ChildError, match=r"^java is missing: apt-get install openjdk-17-jre-headless"):
        broker(tmp_path).prepare()


def test_missing_maven_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "java").write_text("#!/bin/sh\n")
    (tmp_path / "java").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("LORAFLEET_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ChildError, match=r"^mvn is missing: apt-get install maven"):
        broker(tmp_path).prepare()
    assert not (tmp_path / "cache" / "kafka-4.3.1").exists()


def test_not_ready_while_something_else_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        service = Kafka(Path("unused"), other.getsockname()[1], 1, log=Path("unused"))
        assert not service.ready()
