"""The `lorafleet` command; `python -m infra` is the same.

Exit codes: 0 done, 1 failed (a line says why), 2 wrong usage, 3 no such stack runs, or one already does; of `adapters`,
`aliases`, `customers` and `replicas` also 4 not there, 5 refused (the reasons say why), 6 not done yet.
"""

import asyncio
import importlib
import os
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import NoReturn

import click
import msgspec
from clickhouse_connect.driver.exceptions import ClickHouseError
from rich.console import Console

from infra.adapters_cli import adapters, aliases
from infra.customers_cli import customers
from infra.flags import NO_STACK, fail, with_home, with_json
from infra.home import Home, HomeInUse, left_overs, stop_processes, supervisor_pid
from infra.local.child import ChildError
from infra.options import StackOptions
from infra.progress import Progress
from infra.query import parse_since, ttft, ttft_table
from infra.replicas_cli import replicas
from infra.state import read_state
from infra.status import as_json, as_tables, status_of
from streams.bus.errors import BusError

DOWN_LIMIT_S = 90.0

with_replicas = click.option(
    "--replicas",
    type=click.IntRange(1),
    metavar="N",
    default=1,
    show_default=True,
    help="Workers; each loads the base model.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """Serve many customers' LoRA adapters on one base model, through Kafka.

    Exit codes: 0 done, 1 failed (a line says why), 2 wrong usage, 3 no such stack runs, or one already does; of
    `adapters`, `aliases`, `customers` and `replicas` also 4 not there, 5 refused (the reasons say why), 6 not done yet.
    """


main.add_command(adapters)
main.add_command(aliases)
main.add_command(customers)
main.add_command(replicas)


@main.command()
@with_replicas
@click.option("--gateways", type=click.IntRange(1), metavar="N", default=1, show_default=True, help="HTTP front ends.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    show_default="8000 if free, else any",
    help="Port of the first gateway on 127.0.0.1; further ones follow it.",
)
@with_home
def up(replicas: int, gateways: int, port: int | None, home: Path) -> None:
    """Start the whole stack here and keep it running; Ctrl-C stops it.

    Kafka, ClickHouse, the object store and the model are embedded, each unless its variable names your own:
    KAFKA_BOOTSTRAP_SERVERS, CLICKHOUSE_URL, S3_ENDPOINT_URL or LORAFLEET_STORE, LORAFLEET_MODEL.
    """
    _run(_up(StackOptions(home.absolute(), replicas, gateways, port)))


@main.command()
@with_home
def down(home: Path) -> None:
    """Stop the stack of this home, and whatever a killed one has left."""
    console = Console(stderr=True)
    pid = supervisor_pid(home)
    if pid:
        os.kill(pid, signal.SIGTERM)
        end_s = time.monotonic() + DOWN_LIMIT_S
        while supervisor_pid(home):
            if time.monotonic() > end_s:
                fail(f"the supervisor (process {pid}) has not ended within {DOWN_LIMIT_S:g} s; its logs: {home}/logs")
            time.sleep(0.1)
        console.print(f"stopped the stack in {home}", highlight=False)
        return
    if home.exists():
        with Home(home):
            found = left_overs(home)
            stop_processes(found)
        if found:
            console.print(f"stopped {len(found)} processes left over in {home}", highlight=False)
            return
    fail(f"no stack runs in {home}", NO_STACK)


@main.command()
@with_json
@with_home
def status(wants_json: bool, home: Path) -> None:
    """Show the stack's parts and the fleet's replicas. Exits 3 when no stack runs."""
    home, pid = home.absolute(), supervisor_pid(home)
    found = status_of(home, read_state(home), pid is not None)
    if wants_json:
        click.echo(as_json(found))
    elif pid and found.state:
        Console().print(as_tables(found))
    else:
        click.echo(f"no stack runs in {home}: lorafleet up", err=True)
    sys.exit(0 if pid else NO_STACK)


@main.group()
def query() -> None:
    """Ask ClickHouse what operators ask most."""


@query.command("ttft")
@click.option(
    "--since", metavar="SPAN", default="1h", show_default=True, help="How far back, such as 90s, 15m, 1h or 7d."
)
@with_json
@with_home
def query_ttft(since: str, wants_json: bool, home: Path) -> None:
    """p50 and p95 time to first token, requests and tokens, per customer and tier."""
    try:
        seconds = parse_since(since)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--since") from None
    state = read_state(home)
    url = os.environ.get("CLICKHOUSE_URL") or (state.environment.get("CLICKHOUSE_URL") if state else None)
    if not url:
        fail(f"no ClickHouse is known: set CLICKHOUSE_URL, or start a stack in {home.absolute()}", NO_STACK)
    try:
        rows = ttft(url, seconds)
    except ClickHouseError as error:
        fail(f"ClickHouse: {str(error).splitlines()[0]}")
    if wants_json:
        click.echo(msgspec.json.format(msgspec.json.encode(rows)))
    elif rows:
        Console().print(ttft_table(rows, since))
    else:
        click.echo(f"no requests in the last {since}")


@main.command()
@with_replicas
@with_home
def demo(replicas: int, home: Path) -> None:
    """Stream chats of two customers through freshly trained adapters; check it all."""
    show = importlib.import_module("replay.demo")  # slow to import
    _run(show.run(StackOptions(home.absolute(), replicas)))


@main.command()
@click.option(
    "--once", is_flag=True, help="One round, then the end: exit 0 all right, 1 a wrong answer, 6 could not ask."
)
@click.option(
    "--every",
    type=click.FloatRange(1, 3600),
    metavar="SECONDS",
    default=15.0,
    show_default=True,
    help="From the start of one round to that of the next.",
)
@with_json
@with_home
def probe(once: bool, every: float, wants_json: bool, home: Path) -> None:
    """Ask every replica for canaries' answers, for as long as the stack runs; take out what answers wrongly.

    The canaries are trained and registered at the first start. A replica that is wrong twice where another one is right
    is drained; an adapter that alone is wrong everywhere is quarantined. A line a round; wrong answers go to stderr.
    """
    service = importlib.import_module("replay.probe.service")  # slow to import
    _run(service.run(home.absolute(), None if once else every, wants_json))


@main.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure; `lorafleet bench --help` lists what."""
    importlib.import_module("replay.bench").main(list(arguments))  # slow to import


async def _up(options: StackOptions) -> int:
    """Until the first SIGINT, SIGTERM or SIGHUP, which stops the stack; a second one kills it."""
    from infra.supervisor import Stack, running  # slow to import

    console = Console()
    progress = Progress(console)
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    stack: Stack | None = None
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if asked and stack:
            stack.hurry()
        elif not asked:
            asked = True
            progress.note("stopping")
            this.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    try:
        async with running(options, progress) as stack:
            progress.summary(stack.gateway_urls, stack.internal_urls, stack.operator_key)
            await stack.serve()
    except asyncio.CancelledError:
        if not asked:
            raise
    progress.note("stopped")
    return 0


def _run(work: Coroutine[None, None, int]) -> NoReturn:
    try:
        code = asyncio.run(_cancelled_by_signals(work))
    except asyncio.CancelledError:
        code = 128 + signal.SIGTERM
    except HomeInUse as error:
        fail(str(error), NO_STACK)
    except (ChildError, BusError, ClickHouseError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.exit(code)


async def _cancelled_by_signals(work: Coroutine[None, None, int]) -> int:
    """So that a stack is stopped in order, as by Ctrl-C, and not cut off."""
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    return await work
