"""The embedded ClickHouse engine (chDB) of one folder, in this process: one short session per query.

Owns the folder: the engine takes a lock there, and two engines in one process are not possible. A root connection keeps
the engine open; each query gets a connection of its own, so that a database, a setting or `readonly` of one query never
reaches the next, as with ClickHouse's own HTTP. An acknowledged insert survives kill -9; the one in flight is there or
not, and may have missed its materialized views: send it again with the same deduplication token.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import chdb
from chdb.state.sqlitelike import Connection

# INSERT INTO table (columns) SETTINGS ... FORMAT name <data>. VALUES and SELECT have their data in the SQL text.
INSERT = re.compile(
    rb"""\s*INSERT\s+INTO\s+
    (?P<target>(?:TABLE\s+)?(?:`[^`]+`|"[^"]+"|[\w.])+\s*(?:\([^)]*\))?(?:\s*SETTINGS\s[^\n]*?)?)
    \s*FORMAT\s+(?P<format>\w+)[ \t]*;?(?:\r?\n|\s|$)""",
    re.IGNORECASE | re.VERBOSE,
)
# chDB lists the engine, cannot run it, and afterwards cannot open the database that holds the table.
KAFKA_ENGINE = re.compile(rb"\bENGINE\s*=?\s*`?Kafka\b", re.IGNORECASE)
FORMAT = re.compile(r"\bFORMAT\s+(\w+)\s*;?\s*$", re.IGNORECASE)
CODE = re.compile(r"Code: (\d+)\.")
NOT_IMPLEMENTED = 48


class EngineError(Exception):
    """ClickHouse's own error: `code` as in system.errors, and its text, beginning with `Code: `."""

    def __init__(self, text: str) -> None:
        found = CODE.search(text)
        self.code = int(found[1]) if found else 1002
        super().__init__(text[found.start() :] if found else f"Code: 1002. DB::Exception: {text} (UNKNOWN_EXCEPTION)")


class FolderInUse(Exception):
    """Another engine works in this folder."""


@dataclass(frozen=True)
class Query:
    """What a client asks: SQL text, or an INSERT with the data that follows it, in bytes."""

    sql: bytes
    database: str = ""
    settings: Mapping[str, str] | None = None
    params: Mapping[str, str] | None = None
    default_format: str = "TabSeparated"
    readonly: bool = False

    @property
    def is_insert(self) -> bool:
        """Whether data follows the SQL text."""
        return INSERT.match(self.sql) is not None


@dataclass(frozen=True)
class Answer:
    """`format` is empty when there is no result set."""

    body: bytes
    format: str
    read_rows: int = 0
    read_bytes: int = 0
    written_rows: int = 0
    written_bytes: int = 0


class Engine:
    """chDB on `folder`. `run` may be called from several threads at once."""

    def __init__(self, folder: Path) -> None:
        """Opens it. Raises FolderInUse."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = str(folder.absolute())
        try:
            self._root = chdb.connect(self._path)
        except Exception as error:
            status = folder / "status"
            holder = status.read_text(errors="replace").split("\n")[0] if status.exists() else ""
            if "Error initializing EmbeddedServer" not in str(error) or not holder:
                raise
            raise FolderInUse(f"{folder} is in use by another ClickHouse ({holder}): stop that first") from error

    def run(self, query: Query) -> Answer:
        """Runs one query in a session of its own; blocks. Raises EngineError."""
        if KAFKA_ENGINE.search(query.sql):
            raise EngineError(
                f"Code: {NOT_IMPLEMENTED}. DB::Exception: the embedded ClickHouse cannot run the Kafka table engine. "
                "(NOT_IMPLEMENTED)"
            )
        session = chdb.connect(self._path)
        try:
            if query.database:
                session.query(f"USE {_name(query.database)}")
            for setting, value in (query.settings or {}).items():
                session.query(f"SET {_name(setting)} = {_text(value)}")
            if query.readonly:
                session.query("SET readonly = 2")
            insert = INSERT.match(query.sql)
            if insert is None:
                return _selected(session, query)
            return _inserted(session, insert["target"].decode(), insert["format"].decode(), query.sql[insert.end() :])
        except (chdb.ChdbError, RuntimeError) as error:
            raise EngineError(str(error)) from None
        finally:
            session.close()


def _selected(session: Connection, query: Query) -> Answer:
    text = query.sql.decode()
    result = session.query(text, query.default_format, params=dict(query.params or {}))
    named = FORMAT.search(text)
    return Answer(
        body=bytes(result.bytes() or b""),
        format=named[1] if named else query.default_format,
        read_rows=result.rows_read(),
        read_bytes=result.bytes_read(),
        written_rows=result.rows_written(),
        written_bytes=result.bytes_written(),
    )


def _inserted(session: Connection, target: str, data_format: str, data: bytes) -> Answer:
    with session.send_insert(f"INSERT INTO {target}", data_format) as stream:
        stream.append(data)
        result = stream.finish()
    return Answer(b"", "", written_rows=result.rows_written, written_bytes=len(data))


def _name(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace("`", "\\`")
    return f"`{escaped}`"


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
