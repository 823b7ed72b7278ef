"""Fixtures for every test: the real broker, store, ClickHouse and model, started once per run when first asked for.

They run in the main thread, since a child dies with the thread that started it.
"""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.clickhouse import schema
from infra.local.clickhouse import ClickHouse
from infra.local.model import packaged_model
from infra.local.store import Store
from streams.adapters.base_model import base_hash
from tests.stack import Stack, own_namespace


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Holds what the run has started; ask for the parts themselves instead."""
    stack = Stack()
    yield stack
    stack.close()


@pytest.fixture(scope="session")
def kafka(stack: Stack) -> str:
    """host:port of a real broker, shared by the whole run: keep apart by `namespace`."""
    return stack.kafka().bootstrap


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """A prefix for topic names that no other test has. On the shared broker its topics end with the test."""
    if "kafka" in request.fixturenames:
        with own_namespace(request.getfixturevalue("kafka")) as namespace:
            yield namespace
    else:
        yield f"t{uuid.uuid4().hex[:10]}."


@pytest.fixture(scope="session")
def store(stack: Stack) -> Store:
    """A real S3 store with the buckets `adapters` and `uploads`: .endpoint, .access_key, .secret_key, .client()."""
    return stack.store()


@pytest.fixture(scope="session")
def clickhouse_server(stack: Stack) -> ClickHouse:
    return stack.clickhouse()


@pytest.fixture
def clickhouse(clickhouse_server: ClickHouse) -> str:
    """The URL of a database that no other test has, with the product's tables in it."""
    url = clickhouse_server.url(f"t{uuid.uuid4().hex[:10]}")
    schema.apply(url)
    return url


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder of SmolLM2-135M-Instruct in float32, base_hash.json beside it; converted once per user."""
    folder = packaged_model()
    base_hash(folder)
    return folder
