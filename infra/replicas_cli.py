"""`lorafleet replicas`: what each replica holds, and its adapters moved by hand. All of it through the internal API."""

import sys
from pathlib import Path
from typing import Any

import click

from infra.flags import NOT_YET, with_home, with_json
from infra.internal_api import path_of
from infra.showing import as_json, ask, say, show_one, show_rows

REPLICA = {
    "replica_id": "replica",
    "status": "state",
    "gpu": "in slots",
    "ram": "in ram",
    "disk": "on disk",
    "queue_depth": "queue",
    "running": "running",
    "tokens_in_flight": "tokens",
    "loads_per_min": "loads/min",
    "evictions_per_min": "evictions/min",
    "thrashing": "thrashing",
    "failed": "failed loads",
}
FAILURE = {"adapter_id": "adapter", "at_unix_ms": "at", "lasting": "lasting", "reason": "why"}

with_replica = click.argument("replica", type=click.IntRange(0))
with_adapter = click.argument("adapter_id")


@click.group()
def replicas() -> None:
    """Replicas: the workers, and which adapters each has in its slots, in RAM and on its disk.

    Exit codes: 0 done, 1 failed (a load: the line says why), 2 wrong usage, 3 no stack runs, 4 not there, 5 refused (in
    use), 6 not done yet.
    """


@replicas.command("list")
@with_json
@with_home
def replicas_list(wants_json: bool, home: Path) -> None:
    """Every place that was ever held, one line each."""
    found = ask(home, "GET", path_of("replicas"))["replicas"]
    show_rows(found if wants_json else [_line(state) for state in found], "", REPLICA, wants_json)


@replicas.command("state")
@with_replica
@with_json
@with_home
def replicas_state(replica: int, wants_json: bool, home: Path) -> None:
    """Everything that REPLICA said of itself in its last beat."""
    told = ask(home, "GET", path_of("replicas", str(replica), "state"))
    if wants_json:
        click.echo(as_json(told))
        return
    failures = told.pop("failed_loads", [])
    for name in ("bytes", "limit_bytes"):
        told |= {f"{name} {tier}": value for tier, value in told.pop(name, {}).items()}
    show_one(told, wants_json)
    if failures:
        show_rows(failures, "", FAILURE, wants_json)


@replicas.command("load")
@with_replica
@with_adapter
@click.option(
    "--wait",
    type=click.IntRange(0, 300),
    metavar="SECONDS",
    default=60,
    show_default=True,
    help="How long to wait for it to be in a slot; then exit 6, and it goes on.",
)
@with_json
@with_home
def replicas_load(replica: int, adapter_id: str, wait: int, wants_json: bool, home: Path) -> None:
    """Bring ADAPTER_ID into a slot of REPLICA ahead of requests."""
    told = ask(home, "POST", f"{path_of('replicas', str(replica), 'adapters', adapter_id, 'load')}?wait={wait}")
    if not told["done"]:
        say(told, f"{adapter_id} is on its way into a slot of replica {replica}", wants_json)
        sys.exit(NOT_YET)
    say(told, f"{adapter_id} is in a slot of replica {replica}", wants_json)


@replicas.command("unload")
@with_replica
@with_adapter
@click.option("--drain", is_flag=True, help="Wait for the requests that use it; new ones go to other replicas.")
@click.option(
    "--wait",
    type=click.IntRange(0, 300),
    metavar="SECONDS",
    help="With --drain: how long, 60 unless given; then exit 5, and nothing was changed.",
)
@with_json
@with_home
def replicas_unload(replica: int, adapter_id: str, drain: bool, wait: int | None, wants_json: bool, home: Path) -> None:
    """Take ADAPTER_ID out of its slot on REPLICA; it stays in RAM and on disk. Refused while it is in use."""
    if wait is not None and not drain:
        raise click.UsageError("--wait goes with --drain")
    asked = ("?drain=true" + (f"&wait={wait}" if wait is not None else "")) if drain else ""
    told = ask(home, "POST", path_of("replicas", str(replica), "adapters", adapter_id, "unload") + asked)
    say(told, f"{adapter_id} is in no slot of replica {replica} any more", wants_json)


@replicas.command("drain")
@with_replica
@with_json
@with_home
def replicas_drain(replica: int, wants_json: bool, home: Path) -> None:
    """Tell REPLICA to take nothing new, until it is started again. What runs there ends as ever."""
    told = ask(home, "POST", path_of("replicas", str(replica), "drain"))
    say(told, f"replica {replica} was told to take nothing new", wants_json)


def _line(state: dict[str, Any]) -> dict[str, Any]:
    """Adapters as numbers."""
    counts = {tier: len(state.get(f"{tier}_adapters", [])) for tier in ("gpu", "ram", "disk")}
    return state | counts | {"failed": len(state.get("failed_loads", []))}
