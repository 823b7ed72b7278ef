"""What runs in a home: the parts as the supervisor sees them, and the replicas as the first gateway does."""

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table

from infra.operator_key import operator_key
from infra.state import Phase, StackState

GATEWAY_LIMIT_S = 3.0
COLOURS = {Phase.READY: "green", Phase.STARTING: "yellow", Phase.DIED: "red", Phase.STOPPED: "dim"}

REPLICA_COLUMNS = {
    "replica_id": "id",
    "status": "state",
    "running": "run",
    "queue_depth": "wait",
    "tokens_in_flight": "tokens",
    "gpu_adapters": "gpu",
    "ram_adapters": "ram",
    "disk_adapters": "disk",
    "evictions_per_min": "evict/min",
    "mixed_steps": "mixed",
}


class Status(msgspec.Struct, frozen=True):
    """`replicas`: what GET /internal/replicas answers, or None with the reason in `replicas_error`."""

    home: str
    running: bool
    state: StackState | None
    replicas: list[dict[str, Any]] | None
    replicas_error: str = ""


def status_of(home: Path, state: StackState | None, running: bool) -> Status:
    """Asks the first gateway; blocks for at most GATEWAY_LIMIT_S."""
    if not running or state is None or not state.internal_urls:
        return Status(str(home), running, state, None, "no gateway")
    request = urllib.request.Request(
        f"{state.internal_urls[0]}/internal/replicas", headers={"Authorization": f"Bearer {operator_key(home)}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=GATEWAY_LIMIT_S) as answer:
            replicas = json.load(answer)["replicas"]
    except (OSError, ValueError, KeyError) as error:
        return Status(str(home), running, state, None, str(error))
    return Status(str(home), running, state, replicas)


def as_json(status: Status) -> str:
    """Without the environment, which holds secrets."""
    shown = msgspec.to_builtins(status)
    if shown["state"]:
        del shown["state"]["environment"]
    return json.dumps(shown, indent=2)


def as_tables(status: Status) -> Group:
    assert status.state is not None
    parts = Table(title=f"Stack in {status.home}", title_justify="left")
    for heading in ("part", "state"):
        parts.add_column(heading)
    for heading in ("pid", "restarts", "up"):
        parts.add_column(heading, justify="right")
    parts.add_column("address", no_wrap=True)
    for part in status.state.parts:
        up = _span(time.time() - part.since_unix_ms / 1000) if part.pid else "-"
        state = f"[{COLOURS[part.phase]}]{part.phase}[/]"
        parts.add_row(part.name, state, str(part.pid or "-"), str(part.restarts), up, part.address or "-")
    logs = f"A log per part: {status.home}/logs\n"
    if status.replicas is None:
        return Group(parts, logs, f"replicas: unknown ({status.replicas_error})")
    replicas = Table(title="Replicas", title_justify="left")
    for field, heading in REPLICA_COLUMNS.items():
        replicas.add_column(heading, justify="left" if field in ("replica_id", "status") else "right")
    for replica in status.replicas:
        replicas.add_row(*(_cell(replica.get(field)) for field in REPLICA_COLUMNS))
    return Group(parts, logs, replicas)


def _cell(value: object) -> str:
    """A list stands as its length."""
    if isinstance(value, list):
        return str(len(value))
    return "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


def _span(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
