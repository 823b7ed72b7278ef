"""`lorafleet adapters` and `lorafleet aliases`: the life of an adapter, by hand. All of it through the internal API."""

import sys
from pathlib import Path
from typing import Any

import click

from infra.flags import FAILED, NO_STACK, NOT_YET, fail, with_home, with_json
from infra.internal_api import InternalApi, NoStackError, path_of
from infra.showing import ask, say, show_one, show_rows
from infra.upload import BadFolder, registration, upload

ADAPTER = {
    "adapter_id": "adapter",
    "status": "state",
    "rank": "rank",
    "size_bytes": "bytes",
    "updated_unix_ms": "since",
}
ALIAS = {"alias": "alias", "adapter_id": "adapter", "previous_adapter_id": "previous", "trial": "on trial",
         "updated_unix_ms": "since"}  # fmt: skip
EVENT = {"at_unix_ms": "at", "kind": "what", "command": "by command", "alias": "alias", "adapter_id": "adapter",
         "share": "share", "previous_adapter_id": "from", "by": "who", "why": "why"}  # fmt: skip

with_wait = click.option(
    "--wait",
    type=click.IntRange(0, 60),
    metavar="SECONDS",
    default=60,
    show_default=True,
    help="How long to wait for the new version to be warm; then exit 6, and it goes on.",
)
with_customer = click.option("--customer", metavar="NAME", default="", help="Only this customer's.")


@click.group()
def adapters() -> None:
    """Adapters: immutable versions of customers' LoRAs, such as acme/support@7.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no stack runs, 4 not there, 5 refused, 6 not done yet.
    """


@click.group()
def aliases() -> None:
    """Aliases, such as acme/support:prod: the names that chats use, each pointing at one adapter.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no stack runs, 4 not there, 5 refused, 6 not done yet.
    """


@adapters.command("list")
@with_customer
@with_json
@with_home
def adapters_list(customer: str, wants_json: bool, home: Path) -> None:
    """All adapters, retired ones too."""
    show_rows(ask(home, "GET", path_of("adapters"))["adapters"], customer, ADAPTER, wants_json)


@adapters.command("show")
@click.argument("adapter_id")
@with_json
@with_home
def adapters_show(adapter_id: str, wants_json: bool, home: Path) -> None:
    """Everything known of one adapter, and the aliases that point at it."""
    show_one(ask(home, "GET", path_of("adapters", adapter_id)), wants_json)


@adapters.command("register")
@click.argument("adapter_id")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--weights-uri", metavar="URI", help="Where FOLDER's safetensors file lies already; else it is uploaded.")
@click.option("--base-model-hash", metavar="HASH", help="Of the base it was trained on; else the served one's.")
@with_json
@with_home
def adapters_register(
    adapter_id: str, folder: Path, weights_uri: str | None, base_model_hash: str | None, wants_json: bool, home: Path
) -> None:
    """Register the PEFT adapter in FOLDER (adapter_config.json, adapter_model.safetensors) as ADAPTER_ID."""
    try:
        api = InternalApi(home.absolute())
        uri = weights_uri or upload(api.environment, folder, adapter_id)
        body = registration(api.environment, folder, adapter_id, uri, base_model_hash)
    except NoStackError as error:
        fail(str(error), NO_STACK)
    except BadFolder as error:
        fail(str(error), FAILED)
    say(ask(home, "POST", path_of("adapters"), body), f"{adapter_id} is ready", wants_json)


@adapters.command("retire")
@click.argument("adapter_id")
@with_json
@with_home
def adapters_retire(adapter_id: str, wants_json: bool, home: Path) -> None:
    """Take ADAPTER_ID out of service for good. Refused while an alias points at it."""
    say(ask(home, "DELETE", path_of("adapters", adapter_id)), f"{adapter_id} is retired", wants_json)


@adapters.command("quarantine")
@click.argument("adapter_id")
@click.option("--why", metavar="TEXT", required=True, help="What whoever asks for the adapter is told.")
@with_json
@with_home
def adapters_quarantine(adapter_id: str, why: str, wants_json: bool, home: Path) -> None:
    """Serve nobody with ADAPTER_ID until it is released. Aliases stay; chats are told why."""
    told = ask(home, "POST", path_of("adapters", adapter_id, "quarantine"), {"why": why})
    say(told, f"{adapter_id} is quarantined", wants_json)


@adapters.command("release")
@click.argument("adapter_id")
@with_json
@with_home
def adapters_release(adapter_id: str, wants_json: bool, home: Path) -> None:
    """Serve ADAPTER_ID, which is quarantined, again."""
    say(ask(home, "POST", path_of("adapters", adapter_id, "release")), f"{adapter_id} is ready", wants_json)


@adapters.command("history")
@click.argument("adapter_id")
@with_json
@with_home
def adapters_history(adapter_id: str, wants_json: bool, home: Path) -> None:
    """What happened to ADAPTER_ID, who did it, and what was refused."""
    show_rows(ask(home, "GET", path_of("adapters", adapter_id, "history"))["events"], "", EVENT, wants_json)


@aliases.command("list")
@with_customer
@with_json
@with_home
def aliases_list(customer: str, wants_json: bool, home: Path) -> None:
    """All aliases and where they point."""
    show_rows(ask(home, "GET", path_of("aliases"))["aliases"], customer, ALIAS, wants_json)


@aliases.command("set")
@click.argument("alias")
@click.argument("adapter_id")
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Of ALIAS' conversations. Below 1 it is a trial: the rest stays, and it ends by itself if it fails.",
)
@with_wait
@with_json
@with_home
def aliases_set(alias: str, adapter_id: str, share: float, wait: int, wants_json: bool, home: Path) -> None:
    """Point ALIAS at ADAPTER_ID: make it, deploy a version, which is warmed up first, or try one."""
    body = {"adapter_id": adapter_id, "share": share}
    told = ask(home, "PUT", f"{path_of('aliases', alias)}?wait={wait}", body)
    _moved(told, alias, wants_json)


@aliases.command("rollback")
@click.argument("alias")
@with_wait
@with_json
@with_home
def aliases_rollback(alias: str, wait: int, wants_json: bool, home: Path) -> None:
    """Point ALIAS back at its previous adapter, or call off the version that it is about to move to, or tries."""
    _moved(ask(home, "POST", f"{path_of('aliases', alias, 'rollback')}?wait={wait}"), alias, wants_json)


@aliases.command("history")
@click.argument("alias")
@with_json
@with_home
def aliases_history(alias: str, wants_json: bool, home: Path) -> None:
    """Where ALIAS has pointed, and who moved it."""
    show_rows(ask(home, "GET", path_of("aliases", alias, "history"))["events"], "", EVENT, wants_json)


def _moved(told: dict[str, Any], alias: str, wants_json: bool) -> None:
    if "pending_adapter_id" in told:
        say(told, f"{alias} -> {told['adapter_id']} still: waits for {told['waits_for']}", wants_json)
        sys.exit(NOT_YET)
    came = f", before {told['previous_adapter_id']}" if told["previous_adapter_id"] else ""
    tried = f", and {told['trial_adapter_id']} on trial for {told['trial_share']:.1%}" if "trial_share" in told else ""
    say(told, f"{alias} -> {told['adapter_id']}{came}{tried}", wants_json)
