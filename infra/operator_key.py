"""The operator's API key: made once per home, kept in operator.key, known to the fleet by its hash alone."""

import hashlib
import time
from pathlib import Path

from infra.local.secret import kept_secret
from schemas.customers import ApiKey, Customer
from schemas.reasons import Role
from schemas.topics import CUSTOMERS
from streams.bus.settings import KafkaSettings
from streams.bus.writer import Writer

FILE, OPERATOR = "operator.key", "operator"
HINT_LENGTH = 7


def operator_key(home: Path) -> str:
    """`lf-` and 43 random characters."""
    return kept_secret(home / FILE, "lf-")


async def publish_operator(settings: KafkaSettings, key: str) -> None:
    """Makes `key`, and no other, the key of the customer `operator`. Raises streams.bus.errors.BusUnavailable."""
    api_key = ApiKey(hashlib.sha256(key.encode()).hexdigest(), key[:HINT_LENGTH], Role.OPERATOR)
    record = Customer(OPERATOR, [api_key], updated_unix_ms=time.time_ns() // 1_000_000)
    async with Writer(settings, "supervisor") as writer:
        await writer.send(CUSTOMERS, record, key=OPERATOR, timeout_s=30.0)
