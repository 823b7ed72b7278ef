"""Records as rows of ClickHouse tables. Pure.

A table has one column per field of its struct in schemas/stats.py, in that order, with `at` for at_unix_ms; then
kafka_partition, kafka_offset and batch_day.
"""

from datetime import UTC, date, datetime, timedelta
from typing import Any

import msgspec

from schemas.stats import AttemptFinished, CacheEvent, RequestFinished

TABLES: dict[type[msgspec.Struct], str] = {
    RequestFinished: "requests",
    AttemptFinished: "attempts",
    CacheEvent: "cache_events",
}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_encode = msgspec.json.Encoder().encode


def columns(table: str) -> list[str]:
    [struct] = [struct for struct, name in TABLES.items() if name == table]
    names = ["at" if field == "at_unix_ms" else field for field in struct.__struct_fields__]
    return [*names, "kafka_partition", "kafka_offset", "batch_day"]


def row(value: msgspec.Struct, partition: int, offset: int, day: date) -> bytes:
    """One line of JSONCompactEachRow."""
    at = type(value).__struct_fields__.index("at_unix_ms")
    fields: list[Any] = list(msgspec.structs.astuple(value))
    fields[at] = timestamp(fields[at])
    return _encode([*fields, partition, offset, day])


def timestamp(unix_ms: int) -> str:
    """As ClickHouse reads a DateTime64(3, 'UTC')."""
    return (EPOCH + timedelta(milliseconds=unix_ms)).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def day_of(unix_ms: int) -> date:
    return (EPOCH + timedelta(milliseconds=unix_ms)).date()
