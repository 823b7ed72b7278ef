"""The embedded ClickHouse through the ordinary client, and its tables: deduplicated, rolled up, a column a field."""

import asyncio
import subprocess
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import clickhouse_connect
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError

from infra.clickhouse import schema
from infra.local.chdb_engine import Query
from infra.local.child import python
from infra.local.clickhouse import ClickHouse
from schemas.stats import AttemptFinished, CacheEvent, RequestFinished
from tests.stack import Stack, started

AT = datetime(2026, 11, 30, 12, 0, 30, 123000, tzinfo=UTC)
DEDUPLICATED = {"deduplicate_blocks_in_dependent_materialized_views": 1}


def request_row(number: int, customer: str = "acme", ttft_ms: float = 50.0) -> dict[str, Any]:
    return {
        "request_id": f"r{number}", "at": AT, "customer": customer, "model": "acme/support:prod",
        "adapter": "acme/support@7", "content_id": "c" * 64, "tier": "gpu", "outcome": "ok", "gateway": 0,
        "gateway_incarnation": 3, "replica": 1, "attempts": 1, "prompt_tokens": 20, "output_tokens": 10,
        "ttft_ms": ttft_ms, "tpot_ms": 12.5, "total_ms": 200.0, "detail": "", "kafka_partition": 0,
        "kafka_offset": number, "batch_day": date(2026, 11, 30),
    }  # fmt: skip


def insert(client: Any, table: str, rows: list[dict[str, Any]], token: str) -> None:
    columns = list(rows[0])
    values = [list(row.values()) for row in rows]
    client.insert(table, values, column_names=columns, settings={**DEDUPLICATED, "insert_deduplication_token": token})


@pytest.mark.real
def test_values_come_back_as_they_went_in(clickhouse: str) -> None:
    with clickhouse_connect.get_client(dsn=clickhouse) as client:
        odd = "q'\\\"\n\tü\0`{}"
        row = client.query("SELECT {a:String}, {b:Array(String)}", parameters={"a": odd, "b": [odd, ""]}).first_row
        assert list(row) == [odd, [odd, ""]]
        client.command("CREATE TABLE t (a UInt64, b String) ENGINE = MergeTree ORDER BY a")
        summary = client.insert("t", [[1, odd], [2**63, ""]], column_names=["a", "b"])
        assert summary.written_rows == 2
        assert client.query("SELECT * FROM t ORDER BY a").result_rows == [(1, odd), (2**63, "")]
        client.command("INSERT INTO t VALUES (3, 'INSERT INTO t FORMAT Native')")
        client.raw_insert("t", ["a", "b"], b'{"a": 4, "b": "four"}\n', fmt="JSONEachRow")
        assert client.query("SELECT b FROM t WHERE a IN (3, 4) ORDER BY a").result_columns == [
            ["INSERT INTO t FORMAT Native", "four"]
        ]


@pytest.mark.real
@pytest.mark.parametrize("compression", ["lz4", "zstd", "gzip"])
async def test_async_client_inserts_and_asks_at_once(clickhouse: str, compression: str) -> None:
    client = await clickhouse_connect.get_async_client(dsn=clickhouse, compress=compression)
    try:
        await client.command("CREATE TABLE t (a UInt64) ENGINE = MergeTree ORDER BY a")
        blocks = [[[number] for number in range(start, start + 1000)] for start in range(0, 8000, 1000)]
        await asyncio.gather(*(client.insert("t", block, column_names=["a"]) for block in blocks))
        answer = await client.query("SELECT count(), sum(a) FROM t")
        assert answer.first_row == (8000, sum(range(8000)))
    finally:
        await client.close()


@pytest.mark.real
@pytest.mark.parametrize(
    ("sql", "code", "status"),
    [
        ("SELECT * FROM nope", 60, 404),
        ("SELEC 1", 62, 400),
        ("SELECT nope", 47, 404),
        ("SELECT 1 SETTINGS nope = 1", 115, 404),
        ("CREATE TABLE q (a Int8) ENGINE = Kafka('localhost:1', 't', 'g', 'JSONEachRow')", 48, 501),
    ],
)
def test_errors_are_clickhouse_errors(clickhouse: str, sql: str, code: int, status: int) -> None:
    with clickhouse_connect.get_client(dsn=clickhouse) as client:
        with pytest.raises(DatabaseError, match=rf"Code: {code}\. DB::Exception: ") as raised:
            client.command(sql)
        assert raised.value.code == code
        assert client.command("SELECT 1") == 1


@pytest.mark.real
def test_a_setting_ends_with_its_query(clickhouse: str) -> None:
    with clickhouse_connect.get_client(dsn=clickhouse) as client:
        assert client.command("SELECT getSetting('readonly')", settings={"readonly": 1}) == 1
        client.command("CREATE TABLE t (a UInt64) ENGINE = MergeTree ORDER BY a")
        client.command("INSERT INTO t VALUES (1)")
        assert client.command("SELECT count() FROM t") == 1


@pytest.mark.real
def test_wrong_password_is_refused(clickhouse: str, clickhouse_server: ClickHouse) -> None:
    user, _, rest = clickhouse.partition("@")
    with pytest.raises(DatabaseError, match="AUTHENTICATION_FAILED"):
        clickhouse_connect.get_client(dsn=f"{user}x@{rest}")


@pytest.mark.real
def test_second_server_in_a_live_folder_says_who_has_it(clickhouse: str, stack: Stack) -> None:
    command = python("infra.local.chdb_server", str(stack.home / "clickhouse" / "data"), "1")
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert "is in use by another ClickHouse (PID: " in second.stderr.splitlines()[-1]


@pytest.mark.real
def test_killed_server_keeps_acknowledged_rows(tmp_path: Path, stack: Stack) -> None:
    service = ClickHouse(tmp_path, stack.ports.allot("clickhouse-killed"), log=tmp_path / "log")
    first = started(service)
    url = service.url("lorafleet")
    schema.apply(url)
    with clickhouse_connect.get_client(dsn=url) as client:
        for block in range(5):
            insert(client, "requests", [request_row(block * 10 + number) for number in range(10)], f"b{block}")
    first.kill()
    first.stop()
    second = started(service)
    try:
        with clickhouse_connect.get_client(dsn=url) as client:
            assert client.command("SELECT count() FROM requests") == 50
            assert client.command("SELECT sum(requests) FROM tenant_1m") == 50
    finally:
        second.stop()


@pytest.mark.real
def test_one_column_per_field(clickhouse: str) -> None:
    kafka = {"kafka_partition", "kafka_offset", "batch_day"}
    with clickhouse_connect.get_client(dsn=clickhouse) as client:
        for table, struct in (
            ("requests", RequestFinished),
            ("attempts", AttemptFinished),
            ("cache_events", CacheEvent),
        ):
            fields = {"at" if name == "at_unix_ms" else name for name in struct.__struct_fields__}
            columns = set(client.query(f"DESCRIBE TABLE {table}").result_columns[0])
            assert columns == fields | kafka, table


@pytest.mark.real
def test_block_sent_again_counts_once_in_rows_and_rollups(clickhouse: str) -> None:
    rows = [request_row(number) for number in range(100)]
    with clickhouse_connect.get_client(dsn=clickhouse) as client:
        for token in ("finished-0-0-99", "finished-0-0-99", "finished-0-100-199"):
            insert(client, "requests", rows, token)
        assert client.command("SELECT count() FROM requests") == 200
        assert client.command("SELECT sum(requests) FROM tenant_1m") == 200
        schema.apply(clickhouse)  # again, as at every start
        assert client.command("SELECT count() FROM requests") == 200


def test_data_is_told_from_sql() -> None:
    with_data = [
        b"INSERT INTO `t` (`a`,`b`) FORMAT Native\n\x01", b"insert into d.t format JSONEachRow {}",
        b"INSERT INTO t (a) SETTINGS async_insert=0, x='y' FORMAT CSV\n1", b"INSERT INTO `a b`.`c` FORMAT TSV\n",
    ]  # fmt: skip
    without = [
        b"INSERT INTO t VALUES ('x FORMAT y')", b"INSERT INTO t SELECT 1 FORMAT Native", b"SELECT 1 FORMAT JSON",
        b"INSERT INTO t (a) VALUES (1) FORMAT Native",
    ]  # fmt: skip
    assert all(Query(sql).is_insert for sql in with_data)
    assert not any(Query(sql).is_insert for sql in without)
