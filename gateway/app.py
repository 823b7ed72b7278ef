"""The public port: chat, over HTTP, websocket and a page; completions, models, health."""

from collections.abc import Collection
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from gateway import cors, pages
from gateway.chat import Chat
from gateway.fleet import Fleet
from gateway.limits import MAX_BODY_BYTES
from gateway.metrics import Metrics
from gateway.middleware import answering, json_answer
from gateway.models import Models
from gateway.pinned import only_where_it_is_obeyed
from gateway.readiness import Readiness
from gateway.tables import Tables
from gateway.websocket import ChatSockets

if TYPE_CHECKING:
    from gateway.traces import Traces


def public_app(
    chat: Chat,
    sockets: ChatSockets,
    models: Models,
    readiness: Readiness,
    tables: Tables,
    fleet: Fleet,
    metrics: Metrics,
    origins: Collection[str] = (),
    traces: "Traces | None" = None,
) -> web.Application:
    async def healthz(_: web.Request) -> web.Response:
        return json_answer(b'{"status":"ok"}')

    async def readyz(_: web.Request) -> web.Response:
        problem = readiness.why_not()
        told = {
            "ready": problem is None,
            "reason": None if problem is None else problem.message,
            "tables": tables.status,
            "claimed": readiness.claimed,
            "broker": readiness.hearing(),
            "live_replicas": len(fleet.candidates(tables.clock.now)),
        }
        return json_answer(orjson.dumps(told), 200 if problem is None else 503)

    middlewares = [answering(metrics), only_where_it_is_obeyed]
    if traces is not None:
        middlewares.insert(0, traces.around)
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
    app.router.add_post("/v1/chat/completions", chat.chat)
    app.router.add_post("/v1/completions", chat.complete)
    app.router.add_get("/v1/chat/ws", sockets.get)
    app.router.add_get("/v1/models", models.list)
    app.router.add_get("/v1/models/{model:.+}", models.get)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    pages.add(app)
    if origins:
        cors.allow(app, origins)
    return app
