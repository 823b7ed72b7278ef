import asyncio

import msgspec
import pytest

from infra.local.ports import pick
from schemas.topics import TOPICS
from streams.bus.admin import ensure_topics, reachable, topic_config
from streams.bus.errors import BusUnavailable, TopicMismatch
from streams.bus.settings import KafkaSettings


def test_tables_are_compacted_and_prompts_do_not_lie_about() -> None:
    for topic in TOPICS:
        config = topic_config(topic)
        assert config["cleanup.policy"] == ("compact" if topic.retention_ms == 0 else "delete")
        assert ("retention.ms" in config) is (topic.retention_ms > 0)
    assert topic_config(next(t for t in TOPICS if t.name == "requests"))["segment.ms"] == "300000"


@pytest.mark.real
async def test_many_processes_may_create_topics_at_once(settings: KafkaSettings) -> None:
    await asyncio.gather(*(ensure_topics(settings) for _ in range(4)))
    await ensure_topics(settings)


@pytest.mark.real
async def test_another_number_of_partitions_is_refused(settings: KafkaSettings) -> None:
    await ensure_topics(settings)
    other = msgspec.structs.replace(settings, gateway_places=5, replica_places=6)
    with pytest.raises(TopicMismatch) as caught:
        await ensure_topics(other)
    for name, found, wanted in (("tokens", 4, 5), ("requests", 4, 6), ("replica-commands", 4, 6)):
        assert f"topic {settings.namespace}{name}: partitions is {found}, wanted {wanted}" in str(caught.value)


@pytest.mark.real
async def test_another_cleanup_policy_is_refused(settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("streams.bus.admin.topic_config", lambda topic: {"cleanup.policy": "delete"})
        await ensure_topics(settings)
    with pytest.raises(TopicMismatch, match=r"adapters: cleanup.policy is delete, wanted compact"):
        await ensure_topics(settings)


@pytest.mark.real
async def test_reachable(settings: KafkaSettings) -> None:
    assert await reachable(settings)


async def test_a_broker_that_is_away() -> None:
    nowhere = KafkaSettings(f"127.0.0.1:{pick(set())}")
    assert not await reachable(nowhere, 1.0)
    with pytest.raises(BusUnavailable, match="topics not ready"):
        await ensure_topics(nowhere, 0.5)
