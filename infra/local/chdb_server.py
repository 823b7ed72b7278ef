"""ClickHouse's HTTP interface over the embedded engine: `python -m infra.local.chdb_server FOLDER PORT`.

The product speaks only this protocol, through clickhouse-connect, here as with a real server. Listens on 127.0.0.1 and
asks for the password in CHDB_PASSWORD. Inserts have threads of their own, so that slow questions do not hold up the
sink. Results are held in memory whole; HTTP sessions, roles and external tables do not exist here. A crash: see
chdb_engine.py.
"""

import asyncio
import hmac
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lz4.frame  # type: ignore[import-untyped]
import orjson
from aiohttp import BasicAuth, web

from infra.local.chdb_engine import Answer, Engine, EngineError, FolderInUse, Query
from infra.local.clickhouse import USER

BODY_LIMIT_BYTES = 1 << 30
INSERT_THREADS, QUERY_THREADS = 2, 4
STOP_S = 5.0  # for queries that run when SIGTERM comes

# Query parameters that are no settings. `session_*`: every query is its own session here.
NOT_SETTINGS = frozenset({
    "query", "query_id", "database", "default_format", "user", "password", "role", "quota_key",
    "session_id", "session_timeout", "session_check", "compress", "decompress", "enable_http_compression",
    "wait_end_of_query", "buffer_size", "client_protocol_version", "send_progress_in_http_headers",
    "http_headers_progress_interval_ms", "cancel_http_readonly_queries_on_client_close",
})  # fmt: skip
AUTHENTICATION_FAILED = 516
STATUS = {
    **dict.fromkeys((164, 497), 403),  # READONLY, ACCESS_DENIED
    AUTHENTICATION_FAILED: 403,
    **dict.fromkeys((36, 41, 53, 62, 70, 117, 386, 457), 400),  # bad arguments, texts, types, parameters
    **dict.fromkeys((16, 46, 47, 50, 56, 60, 63, 73, 81, 115), 404),  # unknown columns, tables, databases, settings
    48: 501,
}


class Server:
    """The handlers. `password` empty: anyone may ask."""

    def __init__(self, engine: Engine, password: str) -> None:
        self._engine = engine
        self._password = password
        self._inserts = ThreadPoolExecutor(INSERT_THREADS, "insert")
        self._queries = ThreadPoolExecutor(QUERY_THREADS, "query")

    def application(self) -> web.Application:
        application = web.Application(client_max_size=BODY_LIMIT_BYTES)
        application.router.add_get("/ping", self.ping)
        application.router.add_get("/", self.answer)
        application.router.add_post("/", self.answer)
        return application

    async def ping(self, request: web.Request) -> web.Response:
        return web.Response(text="Ok.\n")

    async def answer(self, request: web.Request) -> web.Response:
        if not self._allowed(request):
            return _failure(
                EngineError(
                    f"Code: {AUTHENTICATION_FAILED}. DB::Exception: {USER}: Authentication failed: password is "
                    "incorrect, or there is no user with such name. (AUTHENTICATION_FAILED)"
                )
            )
        query = await _query(request)
        if not query.sql.strip():
            return web.Response(text="Ok.\n")
        threads = self._inserts if query.is_insert else self._queries
        try:
            answer = await asyncio.get_running_loop().run_in_executor(threads, self._engine.run, query)
        except EngineError as error:
            return _failure(error)
        return _success(answer, request.query.get("query_id", ""))

    def _allowed(self, request: web.Request) -> bool:
        if header := request.headers.get("Authorization"):
            try:
                login = BasicAuth.decode(header)
            except ValueError:
                return False
            given = (login.login, login.password)
        elif "X-ClickHouse-User" in request.headers:
            given = (request.headers["X-ClickHouse-User"], request.headers.get("X-ClickHouse-Key", ""))
        else:
            given = (request.query.get("user", ""), request.query.get("password", ""))
        return not self._password or _same(given, (USER, self._password))


def _same(given: tuple[str, str], wanted: tuple[str, str]) -> bool:
    return hmac.compare_digest("\n".join(given).encode(), "\n".join(wanted).encode())


async def _query(request: web.Request) -> Query:
    fields: dict[str, str] = dict(request.query)
    if request.content_type == "multipart/form-data":  # how clients send long parameters
        fields |= {name: value for name, value in (await request.post()).items() if isinstance(value, str)}
        body = b""
    else:
        body = await request.read()
        if request.headers.get("Content-Encoding") == "lz4":  # aiohttp has undone the others
            body = lz4.frame.decompress(body)
    text = fields.get("query", "").encode()
    settings = {name: value for name, value in fields.items() if name not in NOT_SETTINGS and name[:6] != "param_"}
    return Query(
        sql=text + b"\n" + body if text and body else text or body,
        database=fields.get("database", ""),
        settings=settings,
        params={name[6:]: value for name, value in fields.items() if name[:6] == "param_"},
        default_format=fields.get("default_format", "TabSeparated"),
        readonly=request.method == "GET" and "readonly" not in settings,
    )


def _success(answer: Answer, query_id: str) -> web.Response:
    summary = {
        "read_rows": str(answer.read_rows),
        "read_bytes": str(answer.read_bytes),
        "written_rows": str(answer.written_rows),
        "written_bytes": str(answer.written_bytes),
    }
    headers = {
        "X-ClickHouse-Summary": orjson.dumps(summary).decode(),
        "X-ClickHouse-Query-Id": query_id,
        "X-ClickHouse-Timezone": "UTC",
    }
    if answer.format:
        headers["X-ClickHouse-Format"] = answer.format
    return web.Response(body=answer.body, headers=headers)


def _failure(error: EngineError) -> web.Response:
    headers = {"X-ClickHouse-Exception-Code": str(error.code)}
    return web.Response(status=STATUS.get(error.code, 500), text=f"{error}\n", headers=headers)


async def serve(folder: Path, port: int, password: str) -> None:
    """Serves until SIGTERM or SIGINT. Raises FolderInUse, OSError (port)."""
    engine = Engine(folder)
    application = Server(engine, password).application()
    runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=STOP_S)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(f"ready on 127.0.0.1:{port}", flush=True)
    await stop.wait()
    await runner.cleanup()
    # Everything acknowledged is on disk. The engine's own way out sometimes takes more than ten seconds.
    os._exit(0)


def main() -> int:
    try:
        folder, port = Path(sys.argv[1]), int(sys.argv[2])
    except (IndexError, ValueError):
        print("usage: python -m infra.local.chdb_server FOLDER PORT", file=sys.stderr)
        return 2
    try:
        asyncio.run(serve(folder, port, os.environ.get("CHDB_PASSWORD", "")))
    except (FolderInUse, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
