"""Thousands of customers with an adapter and an alias each, written straight as records of the compacted topics.

The records are those that the registry and the internal API write, in the product's own types; through these, with a
file each to check and compile, 5,000 would take hours. Who asks next is skewed as in the brief: few ask for most.
"""

import asyncio
import random
import time
from collections.abc import Iterable, Iterator
from hashlib import sha256

from schemas.adapters import AdapterRecord, AliasRecord
from schemas.customers import ApiKey, Customer
from schemas.reasons import AdapterStatus, Role
from schemas.topics import ADAPTERS, ALIASES, CUSTOMERS, Topic
from streams.bus.settings import KafkaSettings
from streams.bus.writer import Writer

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IN_FLIGHT = 1_000_000
AT_ONCE = 1000


def name(number: int) -> str:
    return f"bench-{number:05d}"


def key(number: int) -> str:
    """As long as one that is made."""
    return f"lf-{sha256(name(number).encode()).hexdigest()[:43]}"


def alias(number: int) -> str:
    return f"{name(number)}/support:prod"


def asking(customers: int, seed: int = 0) -> Iterator[int]:
    """Who asks, one after the other, for ever: customer i as often as 1 / (i + 1) says."""
    dice, weights = random.Random(seed), [1 / (number + 1) for number in range(customers)]
    while True:
        yield from dice.choices(range(customers), weights, k=1000)


async def write(kafka: KafkaSettings, base_hash: str, numbers: Iterable[int]) -> None:
    """Raises streams.bus.errors.BusUnavailable."""
    numbers = list(numbers)
    async with Writer(kafka, "crowd") as writer:
        for at in range(0, len(numbers), AT_ONCE):
            sent = [
                writer.send_nowait(topic, row, key=of)
                for number in numbers[at : at + AT_ONCE]
                for topic, of, row in _rows(number, base_hash, time.time_ns() // 1_000_000)
            ]
            await asyncio.gather(*sent)


def _rows(
    number: int, base_hash: str, now_unix_ms: int
) -> Iterator[tuple[Topic, str, Customer | AdapterRecord | AliasRecord]]:
    customer, secret = name(number), key(number)
    adapter_id = f"{customer}/support@1"
    content, source = (sha256(f"{adapter_id} {what}".encode()).hexdigest() for what in ("content", "source"))
    held = ApiKey(sha256(secret.encode()).hexdigest(), secret[:9], Role.CUSTOMER, now_unix_ms)
    yield CUSTOMERS, customer, Customer(customer, [held], IN_FLIGHT, updated_unix_ms=now_unix_ms)
    yield (
        ADAPTERS,
        adapter_id,
        AdapterRecord(
            adapter_id=adapter_id,
            customer=customer,
            version=1,
            base_model_hash=base_hash,
            rank=16,
            alpha=32.0,
            target_modules=MODULES,
            size_bytes=80_000_000,
            weights_uri=f"s3://adapters/{content}.safetensors",
            checksum=content,
            source_uri=f"s3://uploads/{adapter_id}/adapter_model.safetensors",
            source_checksum=source,
            content_id=content,
            status=AdapterStatus.READY,
            command_partition=0,
            command_offset=number,
            updated_unix_ms=now_unix_ms,
        ),
    )
    yield ALIASES, alias(number), AliasRecord(alias(number), customer, adapter_id, "", 0, number, now_unix_ms)
