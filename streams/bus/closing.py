"""Ends aiokafka clients in bounded time. Their own stop() can wait for ever, or raise CancelledError out of nowhere."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

log = logging.getLogger(__name__)

STEP_S = 2.0
CLOSING_S = 4 * STEP_S


async def close_consumer(consumer: AIOKafkaConsumer) -> None:
    """At most about 4 s."""
    await _bounded(consumer.stop(), "a consumer's stop")
    # A stop that was cut short leaves its sockets open; closing them twice does no harm.
    await _bounded(consumer._client.close(), "a consumer's connections")


async def kill_producer(producer: AIOKafkaProducer) -> None:
    """At most about 6 s. Sends nothing more, not even what it holds.

    The sender is cancelled before anything else can run: nothing that it still holds goes out behind a batch that
    failed. Its own stop() would first deliver everything, that is, wait for the broker.
    """
    producer._closed = True  # first: a cancellation of this very call must not leave it looking open
    sender = producer._sender.sender_task
    if sender is not None:
        sender.cancel()
    await _bounded(producer.client.close(), "a producer's connections")
    if sender is not None:
        await asyncio.wait({sender}, timeout=STEP_S)
        if not sender.done():
            sender.cancel()  # it was waiting for its request in flight, which waits for metadata that nobody fetches
            await asyncio.wait({sender}, timeout=STEP_S)
        if sender.done() and not sender.cancelled():
            sender.exception()


async def ended(task: asyncio.Task[None]) -> None:
    """Cancels a task that may be closing clients, and waits: at most CLOSING_S, twice if the cancellation got lost."""
    for _ in range(2):
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CLOSING_S)
    if not task.done():
        log.error("%s does not end", task.get_name())


async def _bounded(work: Coroutine[Any, Any, Any], what: str) -> None:
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=STEP_S)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=STEP_S)
    if not task.done():
        log.warning("%s did not end within %g s", what, 2 * STEP_S)
    elif not task.cancelled() and (error := task.exception()) is not None:
        log.debug("%s: %r", what, error)
