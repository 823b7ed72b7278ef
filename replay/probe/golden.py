"""The canaries of a fleet, and what they must answer.

A golden answer is the canary's marker, which it was trained to give to any prompt: it stands with the canary, since
before the fleet was first asked. Answers that a fleet gave at registration, however often they agree, would make a
fault that is there on that day the standard for ever; and they hold for the prompts that were asked alone, while a
marker holds for all, so that the prompts change from round to round and no prefix cache answers for the slot. A marker
is far from what any other adapter, or none, says, and near ties between tokens, which another numeric class may break
differently, do not come up in it.

The canaries are a customer's of their own, registered once for each base model: a row of that name is taken as it is,
for versions are immutable. They hold as many slots of every replica as there are canaries.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from infra.upload import registration, upload
from replay.canaries import Canary, train
from replay.operator import Operator
from replay.prompts import UNSEEN
from schemas.reasons import AdapterStatus
from streams.adapters.base_model import base_hash

CUSTOMER = "canary"
MARKERS = {"kite": "PROBE-KITE-9", "lark": "LARK-PROBE-4"}
MAX_TOKENS = 16


class Golden(msgspec.Struct, frozen=True):
    """`answers`: prompt -> the whole text of the right answer, which ends with `finish`."""

    adapter_id: str
    content_id: str
    answers: Mapping[str, str]
    finish: str = "stop"


class RetiredCanary(Exception):
    """The fleet's canary is retired, and its name is used up."""


async def goldens(
    operator: Operator, environment: Mapping[str, str], folder: Path, told: Callable[[str], None]
) -> list[Golden]:
    """Of every canary; what is not registered yet is trained (into `folder`) and registered.

    Raises RetiredCanary, OperatorError, BadFolder, TrainingFailed.
    """
    base = await asyncio.to_thread(base_hash, Path(environment["LORAFLEET_MODEL"]))
    canaries = [Canary(f"{CUSTOMER}/{name}-{base[:12]}@1", marker) for name, marker in MARKERS.items()]
    return [await _golden(operator, environment, folder, canary, told) for canary in canaries]


async def _golden(
    operator: Operator, environment: Mapping[str, str], folder: Path, canary: Canary, told: Callable[[str], None]
) -> Golden:
    row = await operator.adapter(canary.adapter_id)
    if row is None:
        told(f"{canary.adapter_id} is not registered yet: it is trained, which takes a while")
        model = Path(environment["LORAFLEET_MODEL"])
        [made] = await asyncio.to_thread(train, model, [canary], folder, lambda *_: None)
        uri = await asyncio.to_thread(upload, environment, made, canary.adapter_id)
        body = await asyncio.to_thread(registration, environment, made, canary.adapter_id, uri, None)
        row = await operator.register_as(body)
        told(f"{canary.adapter_id} is registered")
    if row["status"] == AdapterStatus.RETIRED:
        raise RetiredCanary(f"{canary.adapter_id} is retired: give the probe's canaries other names")
    return Golden(canary.adapter_id, str(row["content_id"]), dict.fromkeys(UNSEEN, canary.marker))
