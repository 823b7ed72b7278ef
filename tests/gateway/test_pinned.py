"""A request that one replica alone may answer: whoever may ask so, and that no other one ever answers it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict

from gateway.flight import End, SendSubmit
from gateway.pinned import HEADER
from schemas.reasons import Outcome, RejectReason
from streams.presence.holders import Lost
from tests.gateway.desk import Desk, admitted, ask, only, rejected, tokens
from tests.gateway.rig import ACME, OPERATOR, PIPELINE, Door, Rig, until
from tests.stack import Stack, own_namespace

BASE = "SmolLM2-135M-Instruct"
ON_ONE = replace(ask(), only_on=1)


def test_it_ends_with_its_replica(desk: Desk) -> None:
    for heard in ([], [0]):
        submit = desk.open(ON_ONE)
        desk.hear(submit, admitted(submit), *(tokens(submit, at, 11) for at in heard))
        end = only(desk.flights.lost([Lost(1, 101, "silent")], 1.0), End)
        assert (end.outcome, end.finish) == (Outcome.UNAVAILABLE, "no_replica")
    assert desk.flights.redrives == 0


def test_refused_there_it_waits_for_that_one_and_for_no_other(desk: Desk) -> None:
    desk.live = [1]
    submit = desk.open(ON_ONE)
    assert desk.hear(submit, rejected(submit, RejectReason.OVERLOADED)) == []
    again = only(desk.flights.tick(2.0, 0.0), SendSubmit).submit
    assert again.replica == 1
    desk.hear(again, rejected(again, RejectReason.STALE))
    desk.live = []
    [end] = desk.flights.tick(4.0, 0.0)
    assert isinstance(end, End)
    assert (end.outcome, end.finish) == (Outcome.UNAVAILABLE, "no_replica")


@pytest.fixture(scope="module")
def pair(kafka: str, model: Path, stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with own_namespace(kafka) as namespace:
        rig = Rig(kafka, namespace, model, tmp_path_factory.mktemp("pinned"))
        rig.prepare()
        try:
            door = rig.gateway(stack.ports.allot("pinned"), stack.ports.allot("pinned-internal"))
            rig.ready(door.child, rig.worker(0), rig.worker(1))
            door.sees(2)
            yield door  # two replicas behind it
        finally:
            rig.stop()


async def post(door: Door, key: str, *places: str, path: str = "/v1/chat/completions") -> tuple[int, dict[str, Any]]:
    """Status and JSON of a chat with a header for each of `places`."""
    body = {"model": BASE, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    headers = CIMultiDict([("Authorization", f"Bearer {key}"), *((HEADER, place) for place in places)])
    async with aiohttp.ClientSession() as session, session.post(door.url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


def answered_by(door: Door) -> list[int]:
    """The replica of each request that has ended, as the gateway's own lines say."""
    rows = [json.loads(line) for line in door.child.output().splitlines() if line.startswith('{"type":"request"')]
    return [row["replica"] for row in rows]


async def test_the_named_replica_answers(pair: Door) -> None:
    """Ten of each: with the router's own choice one of them would go elsewhere."""
    before = len(answered_by(pair))
    places = [0] * 10 + [1] * 10
    for place in places:
        status, told = await post(pair, OPERATOR, str(place))
        assert status == 200, told
    await until(lambda: len(answered_by(pair)) == before + 20, 10, "the lines")
    assert answered_by(pair)[before:] == places


@pytest.mark.parametrize(
    ("key", "places", "status", "code"),
    [
        (ACME, ["0"], 403, "key_not_allowed"),
        (PIPELINE, ["0"], 403, "key_not_allowed"),
        (ACME, ["nonsense"], 403, "key_not_allowed"),
        (ACME, [""], 403, "key_not_allowed"),
        ("lf-nobody", ["0"], 401, "invalid_api_key"),
        (OPERATOR, [], 403, "key_not_allowed"),
        (OPERATOR, ["2"], 404, "not_found"),
        (OPERATOR, ["99999"], 404, "not_found"),
        (OPERATOR, [""], 400, None),
        (OPERATOR, ["-1"], 400, None),
        (OPERATOR, ["x"], 400, None),
        (OPERATOR, ["0", "1"], 400, None),
        (OPERATOR, ["9" * 30], 400, None),
    ],
)
async def test_who_may_name_which(pair: Door, key: str, places: Sequence[str], status: int, code: str | None) -> None:
    found, told = await post(pair, key, *places)
    assert (found, told["error"]["code"]) == (status, code), told


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/ws", "/healthz", "/chat"])
async def test_where_it_would_not_be_obeyed_it_is_refused(pair: Door, path: str) -> None:
    headers = {"Authorization": f"Bearer {OPERATOR}", HEADER: "0"}
    async with aiohttp.ClientSession() as session, session.get(pair.url + path, headers=headers) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, HEADER)
