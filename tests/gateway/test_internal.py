"""The internal API on real parts: two gateways, a registry, a replica. What it answers holds on both gateways."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import openai
import pytest

from replay.kills import busiest
from replay.operator import Operator
from tests.gateway.rig import ACME, GLOBEX, OPERATOR, PIPELINE, Door, Rig
from tests.stack import Stack, own_namespace, wait_until

pytestmark = pytest.mark.real
FIELDS = {"gpu_adapters", "ram_adapters", "queue_depth", "tokens_in_flight", "evictions_per_min"}


class Company:
    """One rig's two gateways, `near` and `far`: commands go to the near one."""

    def __init__(self, rig: Rig, stack: Stack) -> None:
        self.rig = rig
        self.near, self.far = (
            rig.gateway(stack.ports.allot(f"company-{place}"), stack.ports.allot(f"company-internal-{place}"), place)
            for place in range(2)
        )
        rig.ready(self.near.child, self.far.child, rig.control(), rig.worker(WORKER_STEP_MS="5"))
        self.near.sees(1)
        self.far.sees(1)

    def register(self, body: dict[str, Any], key: str = OPERATOR) -> tuple[int, Any]:
        return self.near.told("/internal/adapters", key, "POST", body)

    def made(self, adapter_id: str, seed: int) -> None:
        status, told = self.register(self.rig.registration(adapter_id, seed))
        assert status == 201, told

    def alias(self, name: str, adapter_id: str, key: str = OPERATOR) -> tuple[int, Any]:
        return self.near.told(f"/internal/aliases/{quote(name, safe='')}", key, "PUT", {"adapter_id": adapter_id})


@pytest.fixture(scope="module")
def company(kafka: str, model: Path, stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Company]:
    with own_namespace(kafka) as namespace:
        rig = Rig(kafka, namespace, model, tmp_path_factory.mktemp("company"))
        rig.prepare()
        try:
            yield Company(rig, stack)
        finally:
            rig.stop()


async def chat(door: Door, model: str, question: str, key: str = ACME) -> tuple[str, str, str]:
    """Text, adapter and tier of a chat of 8 tokens."""
    async with door.client(key) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=model, messages=[{"role": "user", "content": question}], max_tokens=8
        )
    return raw.parse().choices[0].message.content or "", raw.headers["x-adapter-id"], raw.headers["x-adapter-tier"]


async def test_from_registration_to_chat(company: Company) -> None:
    body = company.rig.registration("acme/support@1", seed=1)
    status, made = company.register(body, PIPELINE)
    assert (status, made.get("adapter_id"), made.get("status")) == (201, "acme/support@1", "ready"), made
    assert company.register(body)[0] == 200
    status, told = company.alias("acme/support:prod", "acme/support@1", PIPELINE)
    assert (status, told["adapter_id"], told["previous_adapter_id"]) == (201, "acme/support@1", "")
    text, adapter, tier = await chat(company.far, "acme/support:prod", "hello")
    assert (text, adapter) == (company.rig.answer("hello", 8, made["content_id"]), "acme/support@1")
    assert tier in ("ram", "disk", "remote")
    assert (await chat(company.far, "acme/support:prod", "hello"))[2] == "gpu"
    _, state = company.near.told("/internal/replicas/0/state")
    assert set(state) >= FIELDS
    async with company.far.client() as client:
        models = {shown.id: shown async for shown in client.models.list()}
    assert {"acme/support:prod", "acme/support@1", company.rig.model.name} <= set(models)
    assert models["acme/support:prod"].model_dump()["root"] == "acme/support@1"
    async with company.far.client(GLOBEX) as client:
        assert [shown.id async for shown in client.models.list()] == [company.rig.model.name]
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="acme/support:prod", messages=[{"role": "user", "content": "x"}])


async def test_a_flip_holds_everywhere_when_it_is_answered(company: Company) -> None:
    for version in (1, 2):
        company.made(f"acme/flip@{version}", 10 + version)
    previous = ""
    for turn in range(6):
        wanted = f"acme/flip@{1 + turn % 2}"
        for _ in range(2):  # set again, it says again what it replaced
            status, told = company.alias("acme/flip:prod", wanted)
            assert status in (200, 201)
            assert (told["alias"], told["previous_adapter_id"]) == ("acme/flip:prod", previous)
        previous = wanted
        for door in (company.far, company.near):
            assert (await chat(door, "acme/flip:prod", "x"))[1] == wanted


async def test_a_deploy_is_warm_before_it_is_answered_and_the_old_version_leaves(company: Company) -> None:
    for version in (1, 2):
        company.made(f"acme/warmed@{version}", 80 + version)
    company.alias("acme/warmed:prod", "acme/warmed@1")
    await chat(company.far, "acme/warmed:prod", "x")
    assert company.alias("acme/warmed:prod", "acme/warmed@2")[0] == 200
    _, adapter, tier = await chat(company.far, "acme/warmed:prod", "x")
    assert (adapter, tier) == ("acme/warmed@2", "gpu")
    wait_until(
        lambda: "acme/warmed@1" not in company.near.told("/internal/replicas/0/state")[1]["gpu_adapters"], 15, ""
    )


def test_a_call_that_does_not_wait_says_what_for(company: Company) -> None:
    for version in (1, 2):
        company.made(f"acme/later@{version}", 90 + version)
    company.alias("acme/later:prod", "acme/later@1")
    path = "/internal/aliases/acme%2Flater%3Aprod"
    status, told = company.near.told(f"{path}?wait=0", OPERATOR, "PUT", {"adapter_id": "acme/later@2"})
    assert (status, told["adapter_id"], told["pending_adapter_id"]) == (202, "acme/later@1", "acme/later@2")
    assert told["waits_for"].endswith(" to load acme/later@2")  # replica 0, or the registry, if it has just done so
    wait_until(lambda: company.far.told(path)[1]["adapter_id"] == "acme/later@2", 15, "it moves by itself")
    for bad in ("-1", "61", "1.5", "x", ""):
        assert company.near.told(f"{path}?wait={bad}", OPERATOR, "PUT", {"adapter_id": "acme/later@2"})[0] == 400


async def test_a_rollback_leads_back_once(company: Company) -> None:
    for version in (1, 2):
        company.made(f"acme/back@{version}", 14 + version)
    alias, path = "acme/back:prod", "/internal/aliases/acme%2Fback%3Aprod"
    assert company.near.told(f"{path}/rollback", OPERATOR, "POST")[0] == 404
    company.alias(alias, "acme/back@1")
    status, told = company.near.told(f"{path}/rollback", OPERATOR, "POST")
    assert (status, told["error"]["param"]) == (409, "alias")
    company.alias(alias, "acme/back@2")
    for _ in range(2):
        status, told = company.near.told(f"{path}/rollback", PIPELINE, "POST", headers={"Idempotency-Key": "once"})
        assert (status, told["adapter_id"], told["previous_adapter_id"]) == (200, "acme/back@1", "acme/back@2")
    assert (await chat(company.far, alias, "x"))[1] == "acme/back@1"
    assert company.far.told(path)[1]["adapter_id"] == "acme/back@1"
    assert company.near.told(f"{path}/rollback", OPERATOR, "POST", headers={"Idempotency-Key": "x" * 65})[0] == 400


def test_one_adapter_shows_who_points_at_it_and_retires_when_nobody_does(company: Company) -> None:
    for version in (1, 2):
        company.made(f"acme/kept@{version}", 16 + version)
    path = "/internal/adapters/acme%2Fkept%401"
    company.alias("acme/kept:prod", "acme/kept@1")
    status, shown = company.far.told(path, PIPELINE)
    assert (status, shown["adapter_id"], shown["status"], shown["aliases"]) == (
        200, "acme/kept@1", "ready", ["acme/kept:prod"],
    )  # fmt: skip
    status, told = company.near.told(path, PIPELINE, "DELETE")
    assert status == 409
    assert "acme/kept:prod points at acme/kept@1" in told["error"]["message"]
    company.alias("acme/kept:prod", "acme/kept@2")
    assert company.near.told(path, PIPELINE, "DELETE")[0] == 200
    assert company.far.told(path)[1]["status"] == "retired"
    status, told = company.near.told("/internal/aliases/acme%2Fkept%3Aprod/rollback", OPERATOR, "POST")
    assert status == 409
    assert "is retired" in told["error"]["message"]


def test_history_says_who_what_and_why(company: Company) -> None:
    bad = company.rig.registration("acme/story@1", seed=70) | {"rank": 8}
    assert company.register(bad, PIPELINE)[0] == 422
    history = "/internal/adapters/acme%2Fstory%401/history"
    assert company.near.told("/internal/adapters/acme%2Fstory%401")[0] == 404  # the event is all there is of it
    status, told = company.near.told(history, PIPELINE)
    assert (status, [event["kind"] for event in told["events"]]) == (200, ["refused"])
    assert told["events"][0]["by"] == "acme pipeline lf-pipeli"
    assert {reason["field"] for reason in told["events"][0]["reasons"]} == {"rank"}
    for version in (1, 2):
        company.made(f"acme/story@{version}", 70 + version)
        company.alias("acme/story:prod", f"acme/story@{version}")
    company.near.told("/internal/aliases/acme%2Fstory%3Aprod/rollback", PIPELINE, "POST")
    company.near.told("/internal/adapters/acme%2Fstory%402", OPERATOR, "DELETE")
    _, told = company.far.told("/internal/aliases/acme%2Fstory%3Aprod/history", PIPELINE)
    assert [(event["command"], event["adapter_id"], event["by"].split()[1]) for event in told["events"]] == [
        ("alias", "acme/story@1", "operator"),
        *[("alias", "acme/story@2", "operator")] * 2,
        *[("rollback", "acme/story@1", "pipeline")] * 2,
    ]
    _, told = company.far.told("/internal/adapters/acme%2Fstory%402/history")
    assert [event["kind"] for event in told["events"]] == [
        "registered", "warming", "moved", "warming", "moved", "retired",
    ]  # fmt: skip


async def test_a_quarantine_holds_everywhere_and_says_why(company: Company) -> None:
    adapter_id, alias = "acme/rambling@1", "acme/rambling:prod"
    company.made(adapter_id, 90)
    company.alias(alias, adapter_id)
    path = f"/internal/adapters/{quote(adapter_id, safe='')}"
    for turn in range(2):  # twice is harmless
        status, told = company.near.told(f"{path}/quarantine", OPERATOR, "POST", {"why": f"it rambles {turn}"})
        assert (status, told["adapter_id"], told["status"]) == (200, adapter_id, "quarantined")
    for name in (adapter_id, alias):
        with pytest.raises(openai.InternalServerError) as refused:
            await chat(company.far, name, "x")
        assert refused.value.status_code == 503
        assert refused.value.body == {
            "message": f"{name} is quarantined: it rambles 0", "type": "server_error", "param": "model",
            "code": "adapter_quarantined",
        }  # fmt: skip
    assert company.far.told(path)[1]["why"] == "it rambles 0"
    assert company.far.metric("lorafleet_gateway_quarantined_adapters") == 1
    async with company.far.client() as client:
        assert not {adapter_id, alias} & {shown.id async for shown in client.models.list()}
    assert company.near.told(path, OPERATOR, "DELETE")[0] == 409  # an alias points at it
    assert company.near.told(f"{path}/release", OPERATOR, "POST")[1]["status"] == "ready"
    assert (await chat(company.far, alias, "x"))[1] == adapter_id
    _, history = company.far.told(f"{path}/history")
    assert [(event["kind"], event["why"], event["by"]) for event in history["events"][-3:]] == [
        ("quarantined", "it rambles 0", "ops operator lf-operat"),
        ("refused", "", "ops operator lf-operat"),
        ("released", "", "ops operator lf-operat"),
    ]


def test_a_quarantined_adapter_may_be_retired_and_stays_so(company: Company) -> None:
    company.made("acme/worn@1", 91)
    path = "/internal/adapters/acme%2Fworn%401"
    assert company.near.told(f"{path}/quarantine", OPERATOR, "POST", {"why": "it is worn"})[0] == 200
    assert company.near.told(path, OPERATOR, "DELETE")[0] == 200
    for judged, body in (("quarantine", {"why": "it is worn"}), ("release", None)):
        status, told = company.near.told(f"{path}/{judged}", OPERATOR, "POST", body)
        assert (status, "is retired, and stays so" in told["error"]["message"]) == (409, True)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (None, 400, None),
        ({}, 422, "why"),
        ({"why": ""}, 422, "why"),
        ({"why": 5}, 422, "why"),
        ({"why": "x" * 301}, 422, "why"),
        ({"why": "it rambles", "by": "me"}, 422, "by"),
    ],
)
def test_a_quarantine_says_why_in_a_line(company: Company, body: Any, status: int, field: str | None) -> None:
    company.register(company.rig.registration("acme/mute@1", 92))
    found, told = company.near.told("/internal/adapters/acme%2Fmute%401/quarantine", OPERATOR, "POST", body)
    assert (found, told["error"]["param"]) == (status, field), told


def test_refusals(company: Company) -> None:
    honest = company.rig.registration("acme/strict@1", seed=20)
    status, told = company.register({**honest, "rank": "4", "extra": 1, "checksum": 5})
    assert (status, {refusal["field"] for refusal in told["refusals"]}) == (422, {"rank", "extra", "checksum"})
    status, told = company.register({**honest, "rank": 8, "base_model_hash": "0" * 64})
    assert status == 422
    assert {"rank", "base_model_hash"} <= {refusal["field"] for refusal in told["refusals"]}
    assert set(told["error"]) == {"message", "type", "param", "code"}
    status, told = company.register({**honest, "adapter_id": "Acme/strict"})
    assert (status, told["error"]["param"]) == (422, "adapter_id")
    status, told = company.register({**honest, "adapter_id": "umbrella/strict@1"})
    assert (status, told["error"]["param"]) == (422, "adapter_id")
    assert "there is no customer umbrella; PUT /internal/customers/umbrella makes it" in told["error"]["message"]
    assert company.register(honest)[0] == 201  # the id stayed free
    assert company.register(company.rig.registration("acme/strict@1", seed=21))[0] == 409
    assert company.alias("acme/strict:prod", "acme/never@1")[0] == 404
    assert company.near.told("/internal/adapters", OPERATOR, "POST", b"{")[0] == 400
    assert company.near.told("/internal/aliases/nonsense", OPERATOR, "PUT", {"adapter_id": "acme/strict@1"})[0] == 422


@pytest.mark.parametrize(
    ("key", "method", "path", "body", "status"),
    [
        ("", "GET", "/internal/adapters", None, 401),
        ("lf-nobody", "GET", "/internal/replicas", None, 401),
        (ACME, "GET", "/internal/adapters", None, 403),
        (ACME, "GET", "/internal/replicas", None, 403),
        (PIPELINE, "GET", "/internal/replicas", None, 403),
        (PIPELINE, "PUT", "/internal/customers/acme", {}, 403),
        (PIPELINE, "PUT", "/internal/aliases/globex/x:prod", {"adapter_id": "globex/x@1"}, 403),
        (PIPELINE, "DELETE", "/internal/adapters/globex/x@1", None, 403),
        (PIPELINE, "GET", "/internal/adapters/globex/x@1", None, 403),
        (PIPELINE, "GET", "/internal/aliases/globex/x:prod", None, 403),
        (PIPELINE, "POST", "/internal/aliases/globex/x:prod/rollback", None, 403),
        (PIPELINE, "GET", "/internal/adapters/globex/x@1/history", None, 403),
        (PIPELINE, "GET", "/internal/aliases/globex/x:prod/history", None, 403),
        (PIPELINE, "GET", "/internal/aliases/acme/never:prod/history", None, 404),
        (ACME, "GET", "/internal/adapters/acme/x@1/history", None, 403),
        (ACME, "GET", "/internal/aliases/acme/x:prod/history", None, 403),
        ("", "GET", "/internal/aliases/acme/x:prod/history", None, 401),
        (PIPELINE, "GET", "/internal/adapters/acme/never@1", None, 404),
        (PIPELINE, "GET", "/internal/aliases/acme/never:prod", None, 404),
        (PIPELINE, "GET", "/internal/adapters/nonsense", None, 422),
        (ACME, "GET", "/internal/adapters/acme/x@1", None, 403),
        (ACME, "DELETE", "/internal/adapters/acme/x@1", None, 403),
        ("", "POST", "/internal/adapters/acme/x@1/quarantine", {"why": "x"}, 401),
        (ACME, "POST", "/internal/adapters/acme/x@1/quarantine", {"why": "x"}, 403),
        (PIPELINE, "POST", "/internal/adapters/acme/x@1/quarantine", {"why": "x"}, 403),
        (PIPELINE, "POST", "/internal/adapters/acme/x@1/release", None, 403),
        (OPERATOR, "POST", "/internal/adapters/acme/never@1/quarantine", {"why": "x"}, 404),
        (OPERATOR, "POST", "/internal/adapters/acme/never@1/release", None, 404),
        (OPERATOR, "POST", "/internal/adapters/nonsense/quarantine", {"why": "x"}, 422),
        (ACME, "GET", "/internal/aliases/acme/x:prod", None, 403),
        (ACME, "PUT", "/internal/aliases/acme/x:prod", {"adapter_id": "acme/x@1"}, 403),
        (ACME, "POST", "/internal/aliases/acme/x:prod/rollback", None, 403),
        (PIPELINE, "POST", "/internal/replicas/0/adapters/acme/x@1/load", None, 403),
        (OPERATOR, "GET", "/internal/replicas/9/state", None, 404),
        (OPERATOR, "GET", "/internal/replicas/x/state", None, 404),
        (OPERATOR, "GET", "/internal/customers/nobody", None, 404),
        (OPERATOR, "PUT", "/internal/customers/Bad%20Name", {}, 400),
        (OPERATOR, "PUT", "/internal/customers/new", {"colour": "red"}, 400),
        (OPERATOR, "POST", "/internal/replicas/0/adapters/acme%2Fnever%401/load", None, 404),
        (OPERATOR, "GET", "/internal/nothing", None, 404),
    ],
)
def test_who_may_what(company: Company, key: str, method: str, path: str, body: Any, status: int) -> None:
    assert company.near.told(path, key, method, body)[0] == status


def test_a_pipeline_sees_its_own(company: Company) -> None:
    company.made("globex/sales@1", 30)
    seen = company.near.told("/internal/adapters", PIPELINE)[1]["adapters"]
    assert {record["customer"] for record in seen} <= {"acme"}
    everything = company.near.told("/internal/adapters")[1]["adapters"]
    assert "globex/sales@1" in {record["adapter_id"] for record in everything}


async def test_customers_and_keys(company: Company) -> None:
    near, far, base = company.near, company.far, company.rig.model.name
    status, made = near.told("/internal/customers/initech", OPERATOR, "PUT", {"max_in_flight": 5})
    assert (status, made["max_in_flight"], [key["role"] for key in made["keys"]]) == (201, 5, ["customer"])
    assert (await chat(far, base, "x", made["key"]))[1] == "none"
    status, again = near.told("/internal/customers/initech", OPERATOR, "PUT", {"weight": 2})
    assert (status, again["max_in_flight"], len(again["keys"]), "key" in again) == (200, 5, 1, False)
    # Rotation: both are good, then the old one is not, on any gateway.
    status, new = near.told("/internal/customers/initech/keys", OPERATOR, "POST", {})
    assert (status, new["expires_unix_ms"], new["models"]) == (201, 0, [])
    for key in (made["key"], new["key"]):
        await chat(far, base, "x", key)
    old = made["keys"][0]["hint"]
    status, left = near.told(f"/internal/customers/initech/keys/{old}", OPERATOR, "DELETE")
    assert (status, [key["hint"] for key in left["keys"]]) == (200, [new["hint"]])
    for door in (near, far):
        with pytest.raises(openai.AuthenticationError):
            await chat(door, base, "x", made["key"])
        await chat(door, base, "x", new["key"])
    assert near.told(f"/internal/customers/initech/keys/{old}", OPERATOR, "DELETE")[0] == 404
    for path in ("/internal/customers", "/internal/customers/initech", "/internal/customers/initech/keys"):
        status, shown = far.told(path)
        assert status == 200
        assert "sha256" not in str(shown)
        assert new["key"] not in str(shown)


async def test_a_key_that_ends_and_one_for_some_models(company: Company) -> None:
    near, base = company.near, company.rig.model.name
    company.made("acme/bound@1", 40)
    company.made("acme/free@1", 41)
    _, bound = near.told("/internal/customers/acme/keys", OPERATOR, "POST", {"models": ["acme/bound"]})
    assert (await chat(near, "acme/bound@1", "x", bound["key"]))[1] == "acme/bound@1"
    unknown = str(
        (await asyncio.gather(chat(near, "acme/nothing@1", "x", bound["key"]), return_exceptions=True))[0]
    ).replace("acme/nothing@1", "NAME")
    for other in ("acme/free@1", base):
        with pytest.raises(openai.NotFoundError) as refused:
            await chat(near, other, "x", bound["key"])
        assert str(refused.value).replace(other, "NAME") == unknown
    async with near.client(bound["key"]) as client:
        assert [model.id async for model in client.models.list()] == ["acme/bound@1"]
    _, brief = near.told("/internal/customers/acme/keys", OPERATOR, "POST", {"expires_in_s": 2})
    await chat(near, base, "x", brief["key"])
    await asyncio.sleep(2.0)
    with pytest.raises(openai.AuthenticationError, match="has expired"):
        await chat(near, base, "x", brief["key"])
    near.told(f"/internal/customers/acme/keys/{bound['hint']}", OPERATOR, "DELETE")
    hints = [key["hint"] for key in near.told("/internal/customers/acme/keys")[1]["keys"]]
    assert not {bound["hint"], brief["hint"]} & set(hints)


async def test_keys_made_at_once_are_all_there(company: Company) -> None:
    asked = [
        asyncio.to_thread(company.near.told, "/internal/customers/acme/keys", OPERATOR, "POST", {}) for _ in range(6)
    ]
    hints = {told["hint"] for _, told in await asyncio.gather(*asked)}
    there = {key["hint"] for key in company.far.told("/internal/customers/acme/keys")[1]["keys"]}
    assert hints <= there
    for hint in hints:
        company.near.told(f"/internal/customers/acme/keys/{hint}", OPERATOR, "DELETE")


@pytest.mark.parametrize(
    ("customer", "asked", "status", "says"),
    [
        ("acme", {"role": "god"}, 400, "customer, pipeline, operator"),
        ("acme", {"expires_in_s": -1}, 400, "from 0 to"),
        ("acme", {"models": ["globex/sales"]}, 400, "give names of acme's"),
        ("acme", {"models": ["Not A Name"]}, 400, "models is Not A Name"),
        ("acme", {"model": ["acme/a"]}, 400, "did you mean models?"),
        ("nobody", {}, 404, "PUT /internal/customers/nobody makes it"),
    ],
)
def test_keys_that_cannot_be(company: Company, customer: str, asked: dict[str, Any], status: int, says: str) -> None:
    found, told = company.near.told(f"/internal/customers/{customer}/keys", OPERATOR, "POST", asked)
    assert (found, says in told["error"]["message"]) == (status, True), told


def test_customers_that_cannot_be(company: Company) -> None:
    for change, says in (
        ({"max_in_flight": 10**30}, "from 0 to"),
        ({"max_in_flight": -1}, "from 0 to"),
        ({"tokens_per_minute": -1}, "from 0 to"),
        ({"requests_per_minute": 1.5}, "requests_per_minute"),
        ({"weight": 0}, "above 0"),
        ({"max_inflight": 5}, "did you mean max_in_flight?"),
        ({"request_per_minute": 5}, "did you mean requests_per_minute?"),
        ({"colour": "red"}, "leave it out"),
    ):
        status, told = company.near.told("/internal/customers/nobody", OPERATOR, "PUT", change)
        assert status == 400
        assert says in told["error"]["message"]
    assert company.near.told("/internal/customers/nobody")[0] == 404


async def test_a_customer_s_minute_holds_over_both_gateways(company: Company) -> None:
    limits = {"requests_per_minute": 4, "tokens_per_minute": 2_000, "max_input_tokens": 100, "max_output_tokens": 50}
    status, made = company.near.told("/internal/customers/hooli", OPERATOR, "PUT", limits)
    assert (status, {name: made[name] for name in limits}) == (201, limits)
    model = company.rig.model.name

    async def ask(door: Door, text: str = "x", count: int = 8) -> dict[str, str]:
        async with door.client(made["key"]) as client:
            raw = await client.with_options(max_retries=0).chat.completions.with_raw_response.create(
                model=model, messages=[{"role": "user", "content": text}], max_tokens=count
            )
        return {name: value for name, value in raw.headers.items() if name.startswith("x-ratelimit")}

    told = await ask(company.near)
    assert told["x-ratelimit-limit-requests"] == "4"
    assert told["x-ratelimit-remaining-requests"] == "3"
    assert told["x-ratelimit-limit-tokens"] == "2000"
    await ask(company.near)
    await asyncio.sleep(1.0)  # the far gateway hears of it
    told = await ask(company.far)
    assert told["x-ratelimit-remaining-requests"] == "1"
    await ask(company.far)
    with pytest.raises(openai.RateLimitError, match="4 requests per minute are this customer's") as refused:
        await ask(company.far)
    assert 0 < int(refused.value.response.headers["retry-after"]) <= 15
    with pytest.raises(openai.BadRequestError, match="this customer may have 50"):
        await ask(company.near, count=51)
    with pytest.raises(openai.BadRequestError, match="longer than the 100 tokens"):
        await ask(company.near, text="word " * 200)


async def test_what_kills_reads_of_the_replicas(company: Company) -> None:
    async with Operator(company.near.internal, OPERATOR) as operator:
        assert busiest(await operator.replicas()) == 0


def test_warm_and_unload(company: Company) -> None:
    adapter = "acme/warm@1"
    company.made(adapter, 40)

    def in_slots() -> bool:
        return adapter in company.near.told("/internal/replicas/0/state")[1]["gpu_adapters"]

    path = f"/internal/replicas/0/adapters/{quote(adapter, safe='')}"
    assert company.near.told(f"{path}/load", OPERATOR, "POST")[0] == 202
    wait_until(in_slots, 15, "it is in a slot")
    by_name = f"/internal/replicas/0/adapters/{adapter}"
    assert company.near.told(f"{by_name}/unload", OPERATOR, "POST")[0] == 200
    assert not in_slots()
    status, told = company.near.told(f"{by_name}/unload", OPERATOR, "POST")
    assert (status, told["error"]["message"]) == (404, f"{adapter} is in no slot")
    status, told = company.near.told(f"{path}/load?wait=30", OPERATOR, "POST")
    assert (status, told["done"], in_slots()) == (200, True, True)
    for call, what in (("load?wait=301", "wait"), ("unload?drain=yes", "drain"), ("unload?force=1", "force"),
                       ("unload?wait=3", "wait"), ("load?drain=true", "drain")):  # fmt: skip
        status, told = company.near.told(f"{path}/{call}", OPERATOR, "POST")
        assert (status, told["error"]["param"]) == (400, what)
    for call in ("unload", "unload?drain=true", "load"):
        assert company.near.told(f"{path}/{call}", PIPELINE, "POST")[0] == 403


async def test_in_use_it_stays_until_it_is_drained(company: Company) -> None:
    adapter = "acme/busy@1"
    company.made(adapter, 41)
    path = f"/internal/replicas/0/adapters/{adapter}"

    def tell(call: str) -> tuple[int, Any]:
        return company.near.told(f"{path}/{call}", OPERATOR, "POST")

    async with company.far.client() as client:
        stream = await client.chat.completions.create(
            model=adapter, messages=[{"role": "user", "content": "count"}], max_tokens=1000, stream=True
        )
        await anext(stream)
        status, told = await asyncio.to_thread(tell, "unload")
        assert (status, told["error"]["code"]) == (409, "adapter_in_use")
        assert "1 requests run with it" in told["error"]["message"]
        assert (await asyncio.to_thread(tell, "unload?drain=true&wait=1"))[0] == 409
        drain = asyncio.create_task(asyncio.to_thread(tell, "unload?drain=true"))
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        assert (await drain)[0] == 200
    state = company.near.told("/internal/replicas/0/state")[1]
    assert adapter not in state["gpu_adapters"]
    assert adapter in state["ram_adapters"]


def test_a_load_that_fails_says_why_at_once_and_a_deploy_does_too(company: Company) -> None:
    adapter, alias = "acme/torn@2", "acme/torn:prod"
    company.made("acme/torn@1", 42)
    company.alias(alias, "acme/torn@1")
    company.made(adapter, 43)
    record = company.near.told(f"/internal/adapters/{adapter}")[1]
    # What is owned is pulled ahead: before it is unloaded, no file that is cut is looked at again.
    stored = Path(record["weights_uri"].removeprefix("file://"))
    stored.unlink()
    for held in (company.rig.folder / "worker-0" / "data").rglob(f"{record['content_id']}*"):
        held.write_bytes(b"torn")
    if adapter in company.near.told("/internal/replicas/0/state")[1]["ram_adapters"]:
        pytest.skip("it was pulled into RAM before it could be torn")
    status, told = company.near.told(f"/internal/replicas/0/adapters/{adapter}/load?wait=60", OPERATOR, "POST")
    assert (status, told["error"]["code"]) == (503, "adapter_load_failed"), told
    assert "replica 0" in told["error"]["message"]
    [failed] = [f for f in company.near.told("/internal/replicas/0/state")[1]["failed_loads"] if f["lasting"]]
    assert failed["adapter_id"] == adapter
    status, told = company.alias(alias, adapter)
    assert (status, "replica 0 cannot load acme/torn@2" in told["error"]["message"]) == (503, True), told
    assert company.near.told(f"/internal/aliases/{quote(alias, safe='')}")[1]["adapter_id"] == "acme/torn@1"


def test_metrics_tell_of_the_replicas(company: Company) -> None:
    assert company.near.metric("lorafleet_replica_tier_bytes") > 0
    assert company.near.metric("lorafleet_replica_thrashing") == 0


async def test_a_retired_adapter_is_not_there(company: Company) -> None:
    company.made("acme/old@1", 50)
    assert (await chat(company.far, "acme/old@1", "x"))[1] == "acme/old@1"
    status, told = company.near.told("/internal/adapters/acme%2Fold%401", OPERATOR, "DELETE")
    assert (status, told["status"]) == (200, "retired")
    with pytest.raises(openai.NotFoundError) as refused:
        await chat(company.far, "acme/old@1", "x")
    assert "retired" not in refused.value.message


def test_a_dead_gateway_does_not_hold_up_a_flip(company: Company) -> None:
    """The last test of this module: it kills the far gateway."""
    company.made("acme/last@1", 60)
    company.far.child.kill()
    began = time.monotonic()
    status, _ = company.alias("acme/last:prod", "acme/last@1")
    assert status == 201
    assert time.monotonic() - began > 1  # it might still have been serving
