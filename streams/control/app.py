"""The Faust app: one agent on `adapter-commands`, one command at a time, committed after its result is written.

Faust gives what a plain consumer lacks here: a group, so that a second control process takes over the partitions of a
dead one. It owns no tables and no reply topics: the state is read from `adapters` and `aliases` (registrar.py).
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

import faust

from schemas.topics import ADAPTER_COMMANDS
from streams.bus.settings import KafkaSettings

# Raw bytes in, so that what cannot be decoded reaches the registrar, who answers it.
Handle = Callable[[bytes | None, bytes | None, int, int], Awaitable[None]]

SESSION_TIMEOUT_S = 6.0  # the least that brokers take by default: how long a killed process keeps its partitions


def make_app(
    settings: KafkaSettings, instance: int, scratch: Path, handle: Handle, on_assigned: Callable[[], None]
) -> faust.App:
    """`scratch`: this process' own folder; Faust's, which it makes wherever it is told to, lies beside it.

    `handle` gets key, value, partition and offset of each record. `on_assigned`: partitions may now be consumed.
    """
    app = faust.App(
        f"{settings.namespace}lorafleet-control",
        **settings.faust_options(),
        store="memory://",
        datadir=str(scratch.with_name(f"{scratch.name}-faust")),
        autodiscover=False,
        web_enabled=False,
        topic_allow_declare=False,  # streams.bus.admin makes the topics
        topic_disable_leader=True,
        broker_session_timeout=SESSION_TIMEOUT_S,
        broker_heartbeat_interval=2.0,
        broker_commit_interval=0.5,
        # A member with a name keeps its partitions over a restart, instead of waiting for its own death.
        consumer_group_instance_id=f"control-{instance}",
        # A command that is being decided is finished before its partition moves on.
        stream_wait_empty=True,
        worker_redirect_stdouts=False,
    )
    topic = app.topic(
        settings.topic_name(ADAPTER_COMMANDS),
        key_type=bytes,
        value_type=bytes,
        key_serializer="raw",
        value_serializer="raw",
    )

    # More than one at a time would commit past a command that is still being decided.
    @app.agent(topic, name="adapter-commands", concurrency=1)  # type: ignore[untyped-decorator]
    async def decide(stream: faust.Stream[bytes]) -> None:
        async for event in stream.events():
            await handle(event.key, event.value, event.message.partition, event.message.offset)

    @app.on_partitions_assigned.connect  # type: ignore[untyped-decorator]
    async def assigned(*_: object, **__: object) -> None:
        on_assigned()

    return app
