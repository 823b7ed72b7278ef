"""The tables of the numbers path: every statement of the *.sql files here, in one database.

Statements are idempotent (IF NOT EXISTS), so `apply` may run at every start; a later change is an ALTER with
IF NOT EXISTS appended to its table's file. Columns of what happened are the fields of schemas/stats.py, `at` for
at_unix_ms; those of what is (catalogue.sql) are the brief's.
"""

from pathlib import Path
from urllib.parse import urlsplit

import clickhouse_connect

NAMES = ("requests", "attempts", "cache_events", "catalogue", "sink_progress")
FILES = tuple(Path(__file__).with_name(f"{name}.sql") for name in NAMES)


def statements() -> list[str]:
    """Every statement, in order, without its semicolon."""
    return [part.strip() for file in FILES for part in file.read_text().split(";\n") if part.strip()]


def apply(url: str) -> None:
    """Makes the database of `url` (http://user:password@host:port/database) and its tables where missing.

    Blocks. Raises ValueError when the URL names no database, clickhouse_connect's ClickHouseError from the server.
    """
    database = urlsplit(url).path.strip("/")
    if not database:
        raise ValueError("CLICKHOUSE_URL names no database: http://user:password@host:port/database")
    # Not with dsn= alone: the client asks its questions inside the database, which may not be there yet.
    with clickhouse_connect.get_client(dsn=url, database="default") as client:
        known = client.query("SELECT name FROM system.databases WHERE name = {name:String}", {"name": database})
        if not known.result_rows:
            client.command(f"CREATE DATABASE IF NOT EXISTS `{database}`")
    with clickhouse_connect.get_client(dsn=url) as client:
        for statement in statements():
            client.command(statement)
