"""Pages of other origins: none may call the API, but those that a setting names."""

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import public_app
from gateway.errors import ApiError
from gateway.metrics import Metrics
from gateway.openapi import HEADERS
from gateway.ports import listen
from gateway.settings import GatewaySettings
from streams.bus.errors import SettingsError

APP, OTHER = "https://app.example.com", "https://evil.example.com"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


class Refusing:
    """Stands in for every part: whatever is asked of it, it refuses."""

    def __getattr__(self, _: str) -> Any:
        async def handle(request: Any) -> Any:
            raise ApiError("unauthorized", "no key")

        return handle


async def served(*origins: str) -> AsyncIterator[httpx.AsyncClient]:
    part: Any = Refusing()
    metrics = Metrics()
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    runner = await listen(
        public_app(part, part, part, part, part, part, metrics, origins), "t", "127.0.0.1", port, metrics
    )
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        yield client
    await runner.cleanup()


@pytest.fixture
async def opened() -> AsyncIterator[httpx.AsyncClient]:
    async for client in served(APP, "http://localhost:3000"):
        yield client


@pytest.fixture
async def closed() -> AsyncIterator[httpx.AsyncClient]:
    async for client in served():
        yield client


def allowed(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}


async def test_off_by_default(closed: httpx.AsyncClient) -> None:
    preflight = await closed.options("/v1/chat/completions", headers={"Origin": APP} | PREFLIGHT)
    assert preflight.status_code == 405
    assert allowed(preflight) == {}
    assert allowed(await closed.post("/v1/chat/completions", headers={"Origin": APP})) == {}


async def test_a_preflight_of_a_named_origin(opened: httpx.AsyncClient) -> None:
    answer = await opened.options("/v1/chat/completions", headers={"Origin": APP} | PREFLIGHT)
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["Access-Control-Allow-Origin"] == APP
    assert answer.headers["Access-Control-Allow-Methods"] == "POST"
    assert answer.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    assert {"Origin", "Access-Control-Request-Headers"} <= {*answer.headers.get_list("Vary", split_commas=True)}
    assert "Access-Control-Allow-Credentials" not in answer.headers
    listing = await opened.options("/v1/models", headers={"Origin": APP, "Access-Control-Request-Method": "GET"})
    assert listing.headers["Access-Control-Allow-Methods"] == "GET, HEAD"


@pytest.mark.parametrize("origin", [OTHER, "null", APP + ".evil.com", APP.upper(), APP + ":443", ""])
async def test_a_preflight_of_any_other_is_refused(opened: httpx.AsyncClient, origin: str) -> None:
    answer = await opened.options("/v1/chat/completions", headers={"Origin": origin} | PREFLIGHT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert allowed(answer) == {}


async def test_what_asks_for_odd_headers_is_given_none(opened: httpx.AsyncClient) -> None:
    told = {"Origin": APP} | PREFLIGHT | {"Access-Control-Request-Headers": "a;b"}
    answer = await opened.options("/v1/chat/completions", headers=told)
    assert "Access-Control-Allow-Headers" not in answer.headers


async def test_every_answer_may_be_read_by_a_named_origin_refusals_too(opened: httpx.AsyncClient) -> None:
    answer = await opened.post("/v1/chat/completions", headers={"Origin": APP})
    assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (401, APP)
    exposed = {name.strip() for name in answer.headers["Access-Control-Expose-Headers"].split(",")}
    assert exposed >= {"x-request-id", "x-adapter-id", "x-adapter-tier", "retry-after", *HEADERS}
    missing = await opened.post("/v1/nothing", headers={"Origin": APP})
    assert (missing.status_code, missing.headers["Access-Control-Allow-Origin"]) == (404, APP)


async def test_other_origins_get_no_word_and_caches_know_why(opened: httpx.AsyncClient) -> None:
    answer = await opened.post("/v1/chat/completions", headers={"Origin": OTHER})
    assert (allowed(answer), answer.headers["Vary"]) == ({}, "Origin")


async def test_only_the_api(opened: httpx.AsyncClient) -> None:
    for path in ("/healthz", "/chat", "/docs"):
        assert allowed(await opened.get(path, headers={"Origin": APP})) == {}
    assert (await opened.options("/healthz", headers={"Origin": APP} | PREFLIGHT)).status_code == 405
    assert (await opened.options("/v1/nothing", headers={"Origin": APP} | PREFLIGHT)).status_code == 404


@pytest.mark.parametrize(
    "value",
    ["*", "null", "app.example.com", APP + "/", APP + "/a", "https://*.example.com", "https://A.com", APP + ",,"],
)
def test_what_is_no_origin_is_named(tmp_path: Path, value: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    env = {"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:9092", "LORAFLEET_MODEL": str(tmp_path)}
    told = env | {"GATEWAY_CORS_ORIGINS": f"{APP}, http://[::1]:3000 ,tauri://localhost"}
    assert GatewaySettings.from_env(told).cors_origins == {APP, "http://[::1]:3000", "tauri://localhost"}
    assert GatewaySettings.from_env(env).cors_origins == frozenset()
    with pytest.raises(SettingsError, match=r"GATEWAY_CORS_ORIGINS=\S* is no origin"):
        GatewaySettings.from_env(env | {"GATEWAY_CORS_ORIGINS": value})
