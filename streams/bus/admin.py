"""Creates every topic of schemas/topics.py with its settings, and refuses to run on one that differs.

Safe to run by many processes at once, and again: a topic that exists is verified and left alone. A crash in the middle
leaves some topics, which the next run completes.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, NodeNotReadyError, for_code

from schemas.topics import HOUR_MS, TOPICS, Topic
from streams.bus.errors import BusUnavailable, TopicMismatch
from streams.bus.settings import KafkaSettings

TOPIC_ALREADY_EXISTS = 36
RETRY_S = 0.3


def topic_config(topic: Topic) -> dict[str, str]:
    """The topic's settings on the broker."""
    if topic.compacted:
        # The active segment is never compacted: without a short one a table of beats would grow for a week.
        return {
            "cleanup.policy": "compact",
            "segment.ms": "600000",
            "min.cleanable.dirty.ratio": "0.1",
            "max.compaction.lag.ms": str(HOUR_MS),
        }
    config = {"cleanup.policy": "delete", "retention.ms": str(topic.retention_ms)}
    if topic.retention_ms <= HOUR_MS:
        # Retention drops whole segments: prompts must not lie about because their segment is still being filled.
        config |= {"segment.ms": "300000", "segment.bytes": str(64 << 20)}
    return config


async def ensure_topics(settings: KafkaSettings, timeout_s: float = 60.0) -> None:
    """Waits for Kafka. Raises TopicMismatch with every mismatch, or BusUnavailable after `timeout_s`."""
    last: BaseException | None = None
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    async with _admin(settings) as admin:
                        await _create(admin, settings)
                        await _verify(admin, settings)
                        return
                except (KafkaError, OSError) as error:
                    last = error
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        raise BusUnavailable(
            f"topics not ready within {timeout_s:g} s at {settings.bootstrap_servers}: {last!r}"
        ) from last


async def reachable(settings: KafkaSettings, timeout_s: float = 2.0) -> bool:
    """Whether a broker answers a metadata request in time."""
    with contextlib.suppress(KafkaError, OSError, TimeoutError):
        async with asyncio.timeout(timeout_s), _admin(settings):
            return True
    return False


@contextlib.asynccontextmanager
async def _admin(settings: KafkaSettings) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(client_id="lorafleet-admin", **settings.client_kwargs())
    try:
        await admin.start()
        yield admin
    finally:
        with contextlib.suppress(KafkaError, TimeoutError):
            async with asyncio.timeout(2.0):
                await admin.close()


async def _create(admin: AIOKafkaAdminClient, settings: KafkaSettings) -> None:
    wanted = [
        NewTopic(
            settings.topic_name(topic), settings.partitions(topic), settings.replication, None, topic_config(topic)
        )
        for topic in TOPICS
    ]
    try:
        response = await admin.create_topics(wanted)
    except AttributeError as error:
        # aiokafka asks `None` for its node id while a broker that has just come back names no controller yet.
        raise NodeNotReadyError("no controller is known yet") from error
    for name, code, *message in response.topic_errors:  # errors are reported here, none is raised
        if code not in (0, TOPIC_ALREADY_EXISTS):
            raise for_code(code)(f"creating topic {name}: {message}")


async def _verify(admin: AIOKafkaAdminClient, settings: KafkaSettings) -> None:
    names = {settings.topic_name(topic): topic for topic in TOPICS}
    mismatches = []
    for found in await admin.describe_topics(list(names)):
        if found["error_code"]:
            raise for_code(found["error_code"])(f"topic {found['topic']}")  # still on its way: tried again
        partitions, wanted = len(found["partitions"]), settings.partitions(names[found["topic"]])
        if partitions != wanted:
            mismatches.append(f"topic {found['topic']}: partitions is {partitions}, wanted {wanted}")
    resources = [ConfigResource(ConfigResourceType.TOPIC, name, {"cleanup.policy": None}) for name in names]
    for response in await admin.describe_configs(resources):
        for code, message, _, name, entries in response.resources:
            if code:
                raise for_code(code)(f"topic {name}: {message}")
            policy, wanted_policy = entries[0][1], topic_config(names[name])["cleanup.policy"]
            if policy != wanted_policy:
                mismatches.append(f"topic {name}: cleanup.policy is {policy}, wanted {wanted_policy}")
    if mismatches:
        raise TopicMismatch("\n".join(mismatches))
