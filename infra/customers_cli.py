"""`lorafleet customers`: who may ask, with which keys and within which limits. All of it through the internal API."""

import re
from pathlib import Path

import click

from infra.flags import with_home, with_json
from infra.internal_api import path_of
from infra.showing import ask, say, show_one, show_rows

CUSTOMER = {
    "customer": "customer",
    "weight": "weight",
    "max_in_flight": "in flight",
    "requests_per_minute": "requests/min",
    "tokens_per_minute": "tokens/min",
    "updated_unix_ms": "since",
}
KEY = {"hint": "key", "role": "role", "models": "models", "created_unix_ms": "made", "expires_unix_ms": "expires"}
SPANS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class Span(click.ParamType):
    """`90d`, `12h`, `30m` or `60s`, in seconds."""

    name = "span"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"([0-9]{1,9})([smhd])", str(value))
        if found is None or not int(found[1]):
            self.fail(f"{value!r}: give a number and s, m, h or d, such as 90d", param, ctx)
        return int(found[1]) * SPANS_S[found[2]]


@click.group()
def customers() -> None:
    """Customers: their keys and their limits.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no stack runs, 4 not there, 5 refused, 6 not done yet.
    """


@customers.command("list")
@with_json
@with_home
def customers_list(wants_json: bool, home: Path) -> None:
    """All customers and their limits; 0 is none."""
    show_rows(ask(home, "GET", path_of("customers"))["customers"], "", CUSTOMER, wants_json)


@customers.command("show")
@click.argument("customer")
@with_json
@with_home
def customers_show(customer: str, wants_json: bool, home: Path) -> None:
    """One customer, without its keys' secrets, which nobody has."""
    told = ask(home, "GET", path_of("customers", customer))
    show_one(told if wants_json else told | {"keys": [key["hint"] for key in told["keys"]]}, wants_json)


@customers.command("add")
@click.argument("customer")
@with_json
@with_home
def customers_add(customer: str, wants_json: bool, home: Path) -> None:
    """Make CUSTOMER and print its first key, which is not shown again. A customer that is there keeps its keys."""
    told = ask(home, "PUT", path_of("customers", customer), {})
    say(told, told.get("key", f"{customer} is there already: lorafleet customers keys {customer} --add"), wants_json)


@customers.command("limits")
@click.argument("customer")
@click.option("--max-in-flight", type=int, help="Open outputs on one gateway.")
@click.option("--weight", type=float, help="Its share where customers compete.")
@click.option("--requests-per-minute", type=int, help="Over all gateways; 0: no limit.")
@click.option("--tokens-per-minute", type=int, help="Of prompts and outputs, over all gateways; 0: no limit.")
@click.option("--max-input-tokens", type=int, help="Of one prompt; 0: no limit.")
@click.option("--max-output-tokens", type=int, help="Of one output; 0: no limit.")
@with_json
@with_home
def customers_limits(customer: str, wants_json: bool, home: Path, **limits: float | None) -> None:
    """Change CUSTOMER's limits, or show them. They hold on every gateway when the command returns."""
    given = {name: value for name, value in limits.items() if value is not None}
    path = path_of("customers", customer)
    told = ask(home, "GET", path)
    if given:
        told = ask(home, "PUT", path, given)
    show_one({name: told[name] for name in ("customer", *limits)}, wants_json)


@customers.command("keys")
@click.argument("customer")
@click.option("--add", is_flag=True, help="Make a key and print it: it is not shown again.")
@click.option("--role", type=click.Choice(["customer", "pipeline", "operator"]), help="With --add; else customer.")
@click.option("--expires", type=Span(), metavar="SPAN", help="With --add: when it ends, such as 90d; else never.")
@click.option(
    "--model", "models", multiple=True, help="With --add: a name that the key may use, again and again; else all."
)
@click.option("--revoke", metavar="KEY", help="End the key that begins like this, as the list shows it.")
@with_json
@with_home
def customers_keys(
    customer: str,
    add: bool,
    role: str | None,
    expires: int | None,
    models: tuple[str, ...],
    revoke: str | None,
    wants_json: bool,
    home: Path,
) -> None:
    """List CUSTOMER's keys, make one, or revoke one. To rotate: --add, hand it over, --revoke the old one."""
    if add and revoke:
        raise click.UsageError("--add and --revoke: one at a time")
    if not add and (role or expires or models):
        raise click.UsageError("--role, --expires and --model go with --add")
    path = path_of("customers", customer, "keys")
    if add:
        told = ask(home, "POST", path, {"role": role or "customer", "expires_in_s": expires or 0, "models": models})
        say(told, told["key"], wants_json)
    elif revoke:
        told = ask(home, "DELETE", path_of("customers", customer, "keys", revoke))
        say(told, f"{revoke} is revoked: no gateway takes it any more", wants_json)
    else:
        show_rows(ask(home, "GET", path)["keys"], "", KEY, wants_json)
