"""What a stack is asked to be."""

import os
from pathlib import Path

import msgspec


class StackOptions(msgspec.Struct, frozen=True):
    """`port` of the first gateway (the others follow it); None: 8000 if that is free, else the home's own choice."""

    home: Path
    replicas: int = 1
    gateways: int = 1
    port: int | None = None


def default_home() -> Path:
    """LORAFLEET_HOME, else .lorafleet here."""
    return Path(os.environ.get("LORAFLEET_HOME") or ".lorafleet").absolute()
