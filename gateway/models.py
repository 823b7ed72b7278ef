"""GET /v1/models and /v1/models/{id}: the names that a key may use as `model`, the base model among them."""

import msgspec
from aiohttp import web

from gateway.auth import Keys
from gateway.base_model import BaseModel
from gateway.catalogue import Catalogue, not_found
from gateway.middleware import json_answer
from gateway.openai_api import Model, ModelList
from gateway.readiness import Readiness
from schemas.adapters import AdapterRecord
from schemas.reasons import Role


class Models:
    def __init__(self, model: BaseModel, keys: Keys, catalogue: Catalogue, readiness: Readiness) -> None:
        self._model, self._keys, self._catalogue, self._readiness = model, keys, catalogue, readiness

    async def list(self, request: web.Request) -> web.Response:
        return json_answer(msgspec.json.encode(ModelList(list(self._visible(request).values()))))

    async def get(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if (model := self._visible(request).get(name)) is None:
            raise not_found(name)
        return json_answer(msgspec.json.encode(model))

    def _visible(self, request: web.Request) -> dict[str, Model]:
        self._readiness.check_tables()
        identity = self._keys.allow(request.headers.get("Authorization"), Role.CUSTOMER, Role.PIPELINE)
        base = self._model
        visible = {base.name: Model(base.name, base.created, "lorafleet", base.name, None)}
        for name, record in self._catalogue.models(identity.customer.customer):
            visible[name] = _of(name, record, base.name)
        return {name: model for name, model in visible.items() if identity.key.allows(name)}


def _of(name: str, record: AdapterRecord, parent: str) -> Model:
    return Model(name, record.updated_unix_ms // 1000, record.customer, record.adapter_id, parent)
