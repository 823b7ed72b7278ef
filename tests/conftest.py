"""Fixtures for every test: the real broker, store, ClickHouse and model, started once per run when first asked for.

They run in the main thread, since a child dies with the thread that started it.
"""

import uuid
from collections.abc import Iterator

import pytest

from tests.stack import Stack


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
def namespace() -> str:
    """A prefix for topic names that no other test has."""
    return f"t{uuid.uuid4().hex[:10]}."
