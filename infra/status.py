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
    parts.add_column("address")
    parts.add_column("log", overflow="fold")
    for part in status.state.parts:
        up = _span(time.time() - part.since_unix_ms / 1000) if part.pid else "-"
        state = f"[{COLOURS[part.phase]}]{part.phase}[/]"
        log = part.log.removeprefix(f"{status.home}/")
        parts.add_row(part.name, state, str(part.pid or "-"), str(part.restarts), up, part.address or "-", log)
    if status.replicas is None:
        return Group(parts, f"replicas: unknown ({status.replicas_error})")
    replicas = Table(title="Replicas", title_justify="left")
    names = list(dict.fromkeys(name for replica in status.replicas for name in replica))
    flat = [name for name in names if not any(isinstance(r.get(name), dict | list) for r in status.replicas)]
    for name in flat:
        replicas.add_column(name.replace("_", " "))
    for replica in status.replicas:
        replicas.add_row(*(str(replica.get(name, "-")) for name in flat))
    return Group(parts, replicas)


def _span(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
