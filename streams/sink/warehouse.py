"""ClickHouse over HTTP, asked until it answers: nothing here fails, it waits, with back-off, and says so.

Inserts are text that is made once, so that every try has the same bytes, and carry their block's token: a try that was
written although its answer got lost is not written again, neither in the table nor in the views behind it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiohttp
import clickhouse_connect
from clickhouse_connect.driver import AsyncClient
from clickhouse_connect.driver.exceptions import ClickHouseError

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 5, 60
BACKOFF_S = (0.1, 5.0)
SAY_AGAIN_S = 30.0
# A row with a value that its column cannot hold. The server then takes the others: one bad row must not end the sink.
PARSE_ERRORS = ("CANNOT_PARSE", "INCORRECT_DATA", "ARGUMENT_OUT_OF_BOUND", "TYPE_MISMATCH")


class Warehouse:
    """`url`: http://user:password@host:port/database. One at a time uses it per table."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: AsyncClient | None = None
        self._connecting = asyncio.Lock()

    async def query(self, sql: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        async def ask(client: AsyncClient) -> list[tuple[Any, ...]]:
            rows: list[tuple[Any, ...]] = [tuple(row) for row in (await client.query(sql, parameters)).result_rows]
            return rows

        return await self._until_done("query", ask)

    async def insert(self, table: str, columns: Sequence[str], lines: Sequence[bytes], token: str = "") -> None:
        """`lines` in JSONCompactEachRow; at most once per `token`, if there is one. They go into one part, or none."""
        body = b"\n".join(lines)
        settings: dict[str, Any] = {"async_insert": 0}
        if token:
            settings |= {
                "insert_deduplicate": 1,
                "insert_deduplication_token": token,
                "deduplicate_blocks_in_dependent_materialized_views": 1,
            }

        async def send(client: AsyncClient) -> None:
            try:
                await client.raw_insert(table, columns, body, settings, "JSONCompactEachRow")
            except ClickHouseError as error:
                if not any(name in str(error) for name in PARSE_ERRORS):
                    raise
                log.error("%s: a row that does not fit its columns is left out: %s", table, error)
                tolerant = settings | {"input_format_allow_errors_ratio": 1}
                await client.raw_insert(table, columns, body, tolerant, "JSONCompactEachRow")

        await self._until_done(f"insert into {table}", send)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _until_done(self, what: str, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
        backoff_s, said_at = BACKOFF_S[0], -SAY_AGAIN_S
        while True:
            try:
                return await work(await self._connected())
            except (ClickHouseError, aiohttp.ClientError, OSError, TimeoutError) as error:
                if time.monotonic() - said_at >= SAY_AGAIN_S:
                    log.warning("ClickHouse: %s waits: %s", what, str(error) or repr(error))
                    said_at = time.monotonic()
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_S[1])

    async def _connected(self) -> AsyncClient:
        async with self._connecting:
            if self._client is None:
                self._client = await clickhouse_connect.get_async_client(
                    dsn=self._url,
                    connect_timeout=CONNECT_TIMEOUT_S,
                    send_receive_timeout=ANSWER_TIMEOUT_S,
                    query_retries=0,
                )
            return self._client
