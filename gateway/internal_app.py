"""The internal port: /internal/* for operators and the fine-tuning pipeline, /metrics for Prometheus.

Ids may be raw or percent-encoded.
"""

from aiohttp import web

from gateway.internal_adapters import InternalAdapters
from gateway.internal_customers import InternalCustomers
from gateway.internal_keys import InternalKeys
from gateway.internal_replicas import InternalReplicas
from gateway.metrics import Metrics
from gateway.middleware import answering

MAX_BODY_BYTES = 64 << 10
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def internal_app(
    adapters: InternalAdapters,
    replicas: InternalReplicas,
    customers: InternalCustomers,
    keys: InternalKeys,
    metrics: Metrics,
) -> web.Application:
    async def prometheus(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": METRICS_TYPE})

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[answering(metrics)])
    app.router.add_post("/internal/adapters", adapters.register)
    app.router.add_get("/internal/adapters", adapters.adapters)
    app.router.add_get("/internal/adapters/{adapter_id:.+}/history", adapters.adapter_history)
    app.router.add_post("/internal/adapters/{adapter_id:.+}/quarantine", adapters.quarantine)
    app.router.add_post("/internal/adapters/{adapter_id:.+}/release", adapters.release)
    app.router.add_get("/internal/adapters/{adapter_id:.+}", adapters.adapter)
    app.router.add_delete("/internal/adapters/{adapter_id:.+}", adapters.retire)
    app.router.add_get("/internal/aliases", adapters.aliases)
    app.router.add_get("/internal/aliases/{alias:.+}/history", adapters.alias_history)
    app.router.add_get("/internal/aliases/{alias:.+}", adapters.alias)
    app.router.add_put("/internal/aliases/{alias:.+}", adapters.set_alias)
    app.router.add_post("/internal/aliases/{alias:.+}/rollback", adapters.rollback)
    app.router.add_get("/internal/replicas", replicas.list)
    app.router.add_get("/internal/replicas/{replica_id}/state", replicas.state)
    app.router.add_post("/internal/replicas/{replica_id}/drain", replicas.drain)
    app.router.add_post("/internal/replicas/{replica_id}/adapters/{adapter_id:.+}/load", replicas.load)
    app.router.add_post("/internal/replicas/{replica_id}/adapters/{adapter_id:.+}/unload", replicas.unload)
    app.router.add_get("/internal/customers", customers.list)
    app.router.add_get("/internal/customers/{customer}", customers.get)
    app.router.add_put("/internal/customers/{customer}", customers.put)
    app.router.add_get("/internal/customers/{customer}/keys", keys.list)
    app.router.add_post("/internal/customers/{customer}/keys", keys.make)
    app.router.add_delete("/internal/customers/{customer}/keys/{hint}", keys.revoke)
    app.router.add_get("/metrics", prometheus)
    return app
