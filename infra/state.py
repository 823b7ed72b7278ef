"""state.json in a home folder: what runs there, for `status`, `down` and whoever wants to reach the stack.

Written whole by the supervisor at every change, readable by its owner alone: the environment holds secrets. It stays
after the stack has ended; whether that runs is told by the lock, see home.py.
"""

from enum import StrEnum
from pathlib import Path

import msgspec

from infra.local.secret import write_private

FILE = "state.json"


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DIED = "died"  # waits to be started again
    STOPPED = "stopped"


class PartState(msgspec.Struct, frozen=True):
    """`pid` 0: no process. `since_unix_ms`: when this life began."""

    name: str
    phase: Phase
    pid: int
    restarts: int
    since_unix_ms: int
    address: str
    log: str


class StackState(msgspec.Struct, frozen=True):
    """`environment`: what the stack's own processes are given, with which any other process can join it."""

    pid: int
    gateway_urls: list[str]
    internal_urls: list[str]
    environment: dict[str, str]
    parts: list[PartState]


def write_state(home: Path, state: StackState) -> None:
    write_private(home / FILE, msgspec.json.format(msgspec.json.encode(state)).decode() + "\n")


def read_state(home: Path) -> StackState | None:
    """None when there never was a stack, or its file is of another version."""
    try:
        return msgspec.json.decode((home / FILE).read_bytes(), type=StackState)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        return None
