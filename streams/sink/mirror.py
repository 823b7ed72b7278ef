"""The fleet's compacted topics as tables of ClickHouse: adapters, aliases, and the placements that follow from them.

Owns the rows of adapter_rows, alias_rows and placement_rows; one sink at a time writes them (sink.py notices a second).
They are a few seconds old, and the newest `written_ms` of a key counts. Ordering relied on: a key's records are in one
partition. A crash loses nothing: a new life writes every row once more, with a newer `written_ms`, and takes away what
ClickHouse has and the topics do not.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from schemas.adapters import AdapterRecord, AliasRecord
from schemas.placement import OwnerPlan
from schemas.replicas import ReplicaState
from schemas.topics import ADAPTERS, ALIASES, OWNER_PLANS, REPLICAS
from streams.bus.settings import KafkaSettings
from streams.bus.table import Change, Table, TableReader, TableStatus
from streams.placement.placements import owners_of, placements
from streams.presence.replicas import Replicas
from streams.sink.rows import timestamp
from streams.sink.warehouse import Warehouse

log = logging.getLogger(__name__)

LOOK_S, ROUND_S = 0.2, 5.0
AT_ONCE = 5_000

Row = tuple[Any, ...]

_encode = msgspec.json.Encoder().encode


class Kept:
    """One table of ClickHouse, and what was written to it last. A row's first `keys` columns are its key."""

    def __init__(self, warehouse: Warehouse, table: str, keys: int, columns: Sequence[str]) -> None:
        self._warehouse, self._table, self._keys, self._columns = warehouse, table, keys, columns
        self._written: dict[Row, Row | None] | None = None
        self._written_ms = 0

    async def bring(self, rows: Sequence[Row]) -> None:
        """To exactly these rows; what has not changed is not written again."""
        if self._written is None:
            found = await self._warehouse.query(
                f"SELECT {', '.join(self._columns[: self._keys])}, written_ms FROM {self._table} FINAL", {}
            )
            self._written = {row[:-1]: None for row in found}
            self._written_ms = max((row[-1] for row in found), default=0)
        wanted = {row[: self._keys]: row for row in rows}
        changed = [row for key, row in wanted.items() if self._written.get(key) != row]
        gone = [key for key in self._written if key not in wanted]
        self._written_ms = max(time.time_ns() // 1_000_000, self._written_ms + 1)
        await self._insert(self._columns, changed, gone=0)
        await self._insert(self._columns[: self._keys], gone, gone=1)
        self._written = dict(wanted)

    async def _insert(self, columns: Sequence[str], rows: Sequence[Row], gone: int) -> None:
        lines = [_encode([*row, self._written_ms, gone]) for row in rows]
        for at in range(0, len(lines), AT_ONCE):
            await self._warehouse.insert(self._table, [*columns, "written_ms", "gone"], lines[at : at + AT_ONCE])


class Mirror:
    def __init__(self, settings: KafkaSettings, warehouse: Warehouse) -> None:
        self._adapters = Table[AdapterRecord](ADAPTERS, self._moved)
        self._aliases = Table[AliasRecord](ALIASES)
        self._plans = Table[OwnerPlan](OWNER_PLANS, self._moved)
        self._replicas = Replicas()
        tables: list[Table[Any]] = [self._adapters, self._aliases, self._plans]
        self._reader = TableReader(
            settings, [*tables, Table[ReplicaState](REPLICAS, self._replicas.apply)], "mirror tables", fetch_wait_ms=500
        )
        self._adapter_rows = Kept(warehouse, "adapter_rows", 1, ADAPTER_COLUMNS)
        self._alias_rows = Kept(warehouse, "alias_rows", 1, ALIAS_COLUMNS)
        self._placement_rows = Kept(warehouse, "placement_rows", 2, PLACEMENT_COLUMNS)
        self._owners: dict[str, list[int]] = {}  # as of `_serving`; empty when an adapter or a plan has changed
        self._serving: dict[str, set[int]] = {}  # base hash -> places that take work for it

    async def run(self) -> NoReturn:
        """For ever. Raises what ends the tables' reader."""
        async with self._reader, asyncio.TaskGroup() as group:
            group.create_task(self._listen(), name="mirror listens")
            while True:
                if self._reader.status is not TableStatus.LOADING:
                    await self._adapter_rows.bring([_adapter(row) for _, row in self._adapters.items()])
                    await self._alias_rows.bring([_alias(row) for _, row in self._aliases.items()])
                    if self._replicas.heard:
                        await self._placement_rows.bring(self._placed())
                await asyncio.sleep(ROUND_S)

    async def _listen(self) -> NoReturn:
        while True:
            now = time.monotonic()
            self._replicas.tick(now, self._reader.age(now))
            done, _ = await asyncio.wait({self._reader.failed}, timeout=LOOK_S)
            if done:
                self._reader.failed.result()
                raise RuntimeError("the mirror's reader ended")

    def _placed(self) -> list[Row]:
        adapters = dict(self._adapters.items())
        bases = {adapter.base_model_hash for adapter in adapters.values()}
        serving = {base: set(self._replicas.serving(base)) for base in bases}
        if not self._owners or serving != self._serving:
            self._serving = serving
            self._owners = {
                name: owners_of(name, serving[adapter.base_model_hash], self._plans.get(name))
                for name, adapter in adapters.items()
            }
        residency = {place: beat.residency for place, beat in self._replicas.beats().items()}
        return [msgspec.structs.astuple(placement) for placement in placements(self._owners, residency, adapters)]

    def _moved(self, _: Change[Any]) -> None:
        self._owners = {}


ADAPTER_COLUMNS = (
    "adapter_id", "tenant_id", "version", "base_model_hash", "rank", "alpha", "target_modules", "size_bytes",
    "weights_uri", "checksum", "status", "why", "content_id", "updated_at",
)  # fmt: skip
ALIAS_COLUMNS = (
    "alias", "tenant_id", "adapter_id", "previous_adapter_id", "pending_adapter_id", "trial_adapter_id",
    "trial_share", "updated_at",
)  # fmt: skip
PLACEMENT_COLUMNS = ("adapter_id", "replica_id", "role", "tier")


def _adapter(row: AdapterRecord) -> Row:
    return (
        row.adapter_id, row.customer, row.version, row.base_model_hash, row.rank, row.alpha, row.target_modules,
        row.size_bytes, row.weights_uri, row.checksum, row.status, row.why, row.content_id,
        timestamp(row.updated_unix_ms),
    )  # fmt: skip


def _alias(row: AliasRecord) -> Row:
    pending = row.pending.adapter_id if row.pending is not None else ""
    trial, share = (row.trial.adapter_id, row.trial.share) if row.trial is not None else ("", 0.0)
    return (
        row.alias, row.customer, row.adapter_id, row.previous_adapter_id, pending, trial, share,
        timestamp(row.updated_unix_ms),
    )  # fmt: skip
