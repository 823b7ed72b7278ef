"""`lorafleet bench`: measurements that print a table, or JSON. Each says what it ran on; none is a test."""

import asyncio
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from infra.local.model import model_folder, packaged_model
from infra.options import StackOptions
from infra.progress import Progress
from infra.supervisor import running
from replay import company as companies
from replay import gateway_bench as carrying
from replay import hop as hops
from replay import key_bench as obedience
from replay import kills as killing
from replay import walkouts as leaving
from replay.adapter_bench import measure as loads
from replay.adapter_bench import tiers
from replay.adapter_bench.table import tables as show_adapters
from replay.beside import beside
from replay.churn import churn as churning
from replay.cores import kept_off
from replay.engine_bench import equal as equality
from replay.engine_bench import measure as engines
from replay.engine_bench import prefix as prefixes
from replay.engine_bench import slots as crowds
from replay.engine_bench.rig import REQUESTS
from replay.engine_bench.table import plain_table, progress_bar
from replay.engine_bench.table import tables as show_engine
from replay.gateway_bench_table import gateway_table, keys_table
from replay.stage import Stage
from replay.streams import PROMPTS, Script
from streams.adapters.shape import ModelShape

STDERR = Console(stderr=True)

with_json = click.option("--json", "wants_json", is_flag=True, help="Print JSON instead of a table.")
with_replicas = click.option("--replicas", type=click.IntRange(1), default=2, show_default=True, help="Workers.")

with_threads = click.option("--threads", type=click.IntRange(1), default=os.cpu_count() or 1, show_default=True)


class Machine(msgspec.Struct, frozen=True):
    """Where and when a figure was made, and by which command."""

    cpu: str
    cores: int
    date: str
    command: str


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure lorafleet on this machine. Every measurement starts a stack of its own, in a folder that it removes."""


@main.command()
@with_json
@click.option("--rates", default="1,40,200", show_default=True, help="Requests per second, comma-separated.")
@click.option("--seconds", type=float, default=20, show_default=True, help="Per rate.")
def hop(wants_json: bool, rates: str, seconds: float) -> None:
    """What gateway, Kafka and worker add to bare HTTP, against a bare round trip and the same path without Kafka."""
    _show(uvloop.run(_hop([float(rate) for rate in rates.split(",")], seconds)), wants_json, _hop_table)


@main.command()
@with_json
@with_replicas
@click.option("--part", type=click.Choice([*killing.PARTS, "each"]), default="each", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="Kills of each part.")
@click.option("--tokens", type=click.IntRange(16), default=200, show_default=True, help="Output tokens of a stream.")
@click.option("--streams", type=click.IntRange(1), default=2, show_default=True, help="Streams at once.")
@click.option("--seed", type=int, default=0, show_default=True)
def kills(wants_json: bool, replicas: int, part: str, rounds: int, tokens: int, streams: int, seed: int) -> None:
    """kill -9 under running streams: what clients saw, and how long until the stack was whole. Fails on any leak."""
    parts = list(killing.PARTS) if part == "each" else [part]
    results = asyncio.run(_kills(parts, replicas, rounds, tokens, streams, seed))
    _show(results, wants_json, _kills_table)
    sys.exit(1 if any(result.different for result in results) else 0)


@main.command()
@with_json
@with_replicas
@click.option("--adapters", type=click.IntRange(2), default=8, show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=48, show_default=True)
def company(wants_json: bool, replicas: int, adapters: int, tokens: int) -> None:
    """Does each of several adapters say the same alone and in company? Fails if not."""
    result = asyncio.run(_company(replicas, adapters, tokens))
    _show([result], wants_json, _company_table)
    sys.exit(0 if result.same == adapters and result.most_in_step >= 2 else 1)


@main.command()
@with_json
@with_replicas
@click.option("--requests", type=click.IntRange(1), default=2000, show_default=True)
@click.option("--adapters", type=click.IntRange(churning.EACH), default=60, show_default=True, help="At the beginning.")
@click.option("--slots", type=click.IntRange(1), default=8, show_default=True, help="Of each worker.")
@click.option("--seed", type=int, default=0, show_default=True)
def churn(wants_json: bool, replicas: int, requests: int, adapters: int, slots: int, seed: int) -> None:
    """Versions come, move, go back and retire under chats through two gateways, while workers are killed.

    Each answer is judged by what it says. Fails on a wrong or stale version, a lost registration, or anything leaked.
    """
    plan = churning.Plan(requests, adapters, max(2, adapters // 2), seed=seed)
    result = asyncio.run(_churn(replicas, slots, plan))
    _show([result], wants_json, _facts_table)
    sys.exit(0 if result.held else 1)


@main.command()
@with_json
@with_replicas
@click.option("--clients", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--adapters", type=click.IntRange(1), default=24, show_default=True, help="Over eight slots.")
@click.option("--seed", type=int, default=0, show_default=True)
def walkouts(wants_json: bool, replicas: int, clients: int, adapters: int, seed: int) -> None:
    """Clients that vanish in queue, load, prefill and decode: what of theirs is left. Fails if anything is."""
    result = asyncio.run(_walkouts(replicas, clients, adapters, seed))
    _show([result], wants_json, _facts_table)
    sys.exit(0 if result.held else 1)


@main.command()
@with_json
@click.option("--registered", type=click.IntRange(1), default=5000, show_default=True, help="Small adapters.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Of each step.")
@click.option("--turns", type=click.IntRange(1), default=6, show_default=True, help="Of decoding.")
@click.option("--tokens", type=click.IntRange(16), default=96, show_default=True, help="Output tokens of a stream.")
@click.option("--restarts", type=click.IntRange(1), default=2, show_default=True, help="Of each part.")
def adapters(wants_json: bool, registered: int, rounds: int, turns: int, tokens: int, restarts: int) -> None:
    """What adapters cost: loads beside plain copies, first tokens by tier, decode meanwhile, thousands registered.

    A short look: --registered 100 --rounds 2 --turns 1 --tokens 32 --restarts 1.
    """
    plan = loads.Plan(registered, rounds, turns, tokens, restarts)
    _show([asyncio.run(_adapters(plan))], wants_json, show_adapters)


@main.command()
@with_json
@click.option("--adapters", default="0,1,8,32", show_default=True, help="Different ones in the batch, a row for each.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Runs of each row.")
@click.option("--pairs", type=click.IntRange(0), default=200, show_default=True, help="Alternating steps of each kind.")
@click.option("--output", type=click.IntRange(2), default=64, show_default=True, help="Output tokens of a request.")
@with_threads
@click.option("--peers/--no-peers", default=True, help="Also transformers, PEFT and a plain torch loop.")
def engine(wants_json: bool, adapters: str, rounds: int, pairs: int, output: int, threads: int, peers: bool) -> None:
    """Speed with 0 to 32 different adapters in the batch, beside the machine's limit and beside peers.

    A short look: --rounds 1 --pairs 20 --output 16 --no-peers.
    """
    counts = sorted({int(count) for count in adapters.split(",")})
    if not counts or counts[0] < 0 or counts[-1] > REQUESTS:
        raise click.BadParameter(f"{adapters}: give numbers from 0 to {REQUESTS}")
    plan = engines.Plan(counts, output=output, rounds=rounds, pairs=pairs, threads=threads, peers=peers)
    with progress_bar(STDERR) as stage:
        result = engines.measure(plan, stage)
    _show([result], wants_json, show_engine)


@main.command()
@with_json
@with_threads
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Runs of each number.")
def slots(wants_json: bool, threads: int, rounds: int) -> None:
    """Twice as many adapters as slots, against as many as slots: is there a cliff?"""
    with tempfile.TemporaryDirectory(prefix="lorafleet-bench-") as folder, progress_bar(STDERR) as stage:
        result = crowds.measure(packaged_model(), Path(folder), threads, rounds, stage)
    _show(result, wants_json, plain_table)


@main.command()
@with_json
@with_threads
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True, help="Requests of each kind.")
def prefix(wants_json: bool, threads: int, rounds: int) -> None:
    """Time to first token under a shared system prompt of 512 tokens, cold and warm."""
    with tempfile.TemporaryDirectory(prefix="lorafleet-bench-") as folder, progress_bar(STDERR) as stage:
        result = prefixes.measure(packaged_model(), Path(folder), threads, rounds, stage)
    _show(result, wants_json, plain_table)


@main.command()
@with_json
@with_threads
@click.option("--adapters", type=click.IntRange(2), default=40, show_default=True)
@click.option("--requests", type=click.IntRange(2), default=500, show_default=True)
def equal(wants_json: bool, threads: int, adapters: int, requests: int) -> None:
    """Greedy requests alone and in a crowd with evictions and preemptions: the same tokens? Fails if not."""
    with tempfile.TemporaryDirectory(prefix="lorafleet-bench-") as folder, progress_bar(STDERR) as stage:
        result = equality.measure(packaged_model(), Path(folder), threads, adapters, requests, stage)
    _show([result], wants_json, plain_table)
    sys.exit(0 if result.differing == 0 and result.evictions and result.preemptions else 1)


@main.command()
@with_json
@click.option(
    "--rate", type=click.FloatRange(1), default=40, show_default=True, help="Requests per second at the peak."
)
@click.option("--tokens", type=click.IntRange(2), default=250, show_default=True, help="Output tokens of each.")
@click.option("--replicas", type=click.IntRange(1, 64), default=26, show_default=True, help="Paced ones.")
@click.option("--customers", type=click.IntRange(1), default=5000, show_default=True, help="With an adapter each.")
@click.option("--streams", type=click.IntRange(1), default=1000, show_default=True, help="Open ones, for their memory.")
@click.option("--seconds", type=click.FloatRange(1), default=12, show_default=True, help="Measured at each rate.")
@click.option("--starts", type=click.IntRange(1), default=3, show_default=True, help="Cold starts of each kind.")
@click.option("--factors", default="1.25,1.5,2,3", show_default=True, help="Of the peak, up to the limit.")
def gateway(wants_json: bool, factors: str, **plan: Any) -> None:
    """What one gateway process on one core adds to a stream, how much it carries, and what that takes."""
    ladder = sorted(float(factor) for factor in factors.split(",") if factor)
    _show([uvloop.run(_gateway(carrying.Plan(**plan, factors=ladder)))], wants_json, gateway_table)


@main.command()
@with_json
@click.option("--gateways", type=click.IntRange(1, 16), default=3, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True, help="Of each change.")
def keys(wants_json: bool, gateways: int, rounds: int) -> None:
    """Seconds until every gateway obeys a revoked key, a changed limit, a rotated key. Fails if one takes too long."""
    results = uvloop.run(_keys(gateways, rounds))
    _show(results, wants_json, keys_table)
    sys.exit(0 if all(result.held for result in results) else 1)


@asynccontextmanager
async def _stage(replicas: int, engine: str = "torch", gateways: int = 1) -> AsyncIterator[Stage]:
    """A stack in a temporary home."""
    os.environ["WORKER_ENGINE"] = engine
    with tempfile.TemporaryDirectory(prefix="lorafleet-bench-") as folder:
        options = StackOptions(Path(folder), replicas, gateways)
        async with running(options, Progress(STDERR)) as stack:
            yield Stage.of(options.home, stack)


async def _adapters(plan: loads.Plan) -> loads.Result:
    os.environ.update(tiers.budgets(ModelShape.of(model_folder())))
    async with _stage(1) as stage:
        with progress_bar(STDERR) as begins:
            return await loads.measure(stage, plan, begins)


async def _hop(rates: list[float], seconds: float) -> list[hops.Hop]:
    async with _stage(1, "simulated") as stage:
        model = stage.model.name
        worker = stage.environment | {"WORKER_REPLICA": "0", "WORKER_ENGINE": "simulated"}
        modules = {
            "direct": (worker, ["replay.direct"]),
            "http": ({}, ["replay.barehttp", model]),
            "road": ({}, ["replay.barehttp", model, stage.kafka.bootstrap_servers]),
        }
        async with AsyncExitStack() as ready:
            doors = {
                name: await ready.enter_async_context(beside(environment, *module))
                for name, (environment, module) in modules.items()
            }
            with STDERR.status("measuring") as status:
                return await hops.measure(stage, doors, rates, seconds, status.update)


async def _gateway(plan: carrying.Plan) -> carrying.Result:
    core = min(os.sched_getaffinity(0))
    with kept_off(core) as others:
        async with _stage(0) as stage:
            with STDERR.status("measuring") as status:
                return await carrying.Bench(stage, plan, core, others, status.update).run()


async def _keys(gateways: int, rounds: int) -> list[obedience.Obeyed]:
    async with _stage(1, "simulated", gateways) as stage, obedience.opened(stage) as bench:
        with STDERR.status("measuring") as status:
            return await bench.run(rounds, status.update)


async def _kills(
    parts: list[str], replicas: int, rounds: int, tokens: int, streams: int, seed: int
) -> list[killing.Kills]:
    def told(number: int, one: killing.Round) -> None:
        errors = f"  {'; '.join(one.errors)}" if one.errors else ""
        STDERR.print(
            f"  {one.part} killed, {number} of {rounds}: {one.same} of {one.streams} streams as undisturbed,"
            f" {one.redrives} re-drives, longest pause {one.longest_pause_s:.1f} s, whole again after"
            f" {one.healed_s:.1f} s{errors}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip

    async with _stage(replicas) as stage:
        cast = await companies.cast(stage, max(1, streams // 2), tokens)
        base = [Script(cast[0].key, stage.model.name, prompt, tokens) for prompt in PROMPTS]
        scripts = [script for pair in zip(cast, base, strict=False) for script in pair][:streams]
        return [await killing.run(stage, part, rounds, scripts, seed, told) for part in parts]


async def _company(replicas: int, adapters: int, tokens: int) -> companies.Company:
    async with _stage(replicas) as stage:
        return await companies.measure(stage, adapters, tokens)


def _small_tiers(slots: int) -> None:
    """For stacks that start from now on: adapters chase each other through all tiers."""
    os.environ |= {"WORKER_SLOTS": f"{slots}", "WORKER_RAM_BYTES": f"{96 << 20}", "WORKER_DISK_BYTES": f"{192 << 20}"}


async def _walkouts(replicas: int, clients: int, adapters: int, seed: int) -> leaving.Walkouts:
    _small_tiers(8)
    async with _stage(replicas) as stage:
        with STDERR.status("walkouts") as status:
            return await leaving.measure(stage, clients, adapters, seed, status.update)


async def _churn(replicas: int, slots: int, plan: churning.Plan) -> churning.Churn:
    _small_tiers(slots)
    with tempfile.TemporaryDirectory(prefix="lorafleet-bench-") as folder, STDERR.status("starting") as status:
        options = StackOptions(Path(folder), replicas, gateways=2)
        async with running(options, Progress(STDERR)) as stack:
            doors = [Stage.of(options.home, stack, gateway) for gateway in range(options.gateways)]
            return await churning.measure(doors, plan, status.update)


def _show(results: list[Any], wants_json: bool, table: Any) -> None:
    machine = Machine(_cpu(), os.cpu_count() or 0, time.strftime("%Y-%m-%d"), "lorafleet " + " ".join(sys.argv[1:]))
    if wants_json:
        told = {"machine": machine, "results": results}
        click.echo(msgspec.json.format(msgspec.json.encode(told)).decode())
        return
    console = Console()
    console.print(table(results))
    console.print(f"{machine.cpu}, {machine.cores} cores, {machine.date}: {machine.command}", highlight=False)


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


HOP_CAPTION = """Kafka: a bare round trip of two hops. memory: the same code over a log in memory.
HTTP: a bare server with the same chunks. road: HTTP, Kafka and a process
behind a socket, without work. Ratios: p50, p99. added: less the HTTP server's.
stolen: taken from the cores by this machine's host."""


def _hop_table(results: list[hops.Hop]) -> Table:
    table = Table(
        "per s", "", "number", "p50 ms", "p99 ms", "/ Kafka", "added / Kafka", "/ road", "stolen", caption=HOP_CAPTION
    )
    for result in results:
        for name, row in (
            ("lorafleet", result.lorafleet),
            ("Kafka", result.pingpong),
            ("memory", result.direct),
            ("HTTP", result.http),
            ("road", result.road),
        ):
            told = (result.ratios, result.added, result.least) if name == "lorafleet" else ()
            ratios = [f"{p50:.2f}, {p99:.2f}" for p50, p99 in told] or ["", "", ""]
            ratios.append(f"{result.stolen:.1%}" if told else "")
            cells = (f"{row.rate:g}", name, row.count, row.p50_ms, row.p99_ms, *ratios)
            table.add_row(*map(str, cells))
    return table


def _kills_table(results: list[killing.Kills]) -> Table:
    table = Table(
        "killed", "times", "streams", "whole and equal", "different", "broken", "re-drives", "pause p50/max s",
        "healed p50/max s", "what broken clients saw",
    )  # fmt: skip
    for r in results:
        pauses, healed = f"{r.pause_p50_s:g}/{r.pause_max_s:g}", f"{r.healed_p50_s:g}/{r.healed_max_s:g}"
        counts = (r.rounds, r.streams, r.whole, r.different, r.broken, r.redrives)
        table.add_row(r.part, *map(str, counts), pauses, healed, "; ".join(r.errors))
    return table


def _facts_table(results: list[msgspec.Struct]) -> Table:
    (result,) = results
    told = msgspec.to_builtins(result)
    table = Table("", "seen")
    for name, value in told.items():
        text = ", ".join(f"{key}: {number}" for key, number in value.items()) if isinstance(value, dict) else value
        table.add_row(name.replace("_", " "), "\n".join(text) or "none" if isinstance(text, list) else str(text))
    return table


def _company_table(results: list[companies.Company]) -> Table:
    table = Table(
        "adapters", "tokens each", "same alone and together", "different texts", "mixed steps", "most in a step"
    )
    for r in results:
        cells = (r.adapters, r.tokens_each, r.same, r.different_texts, r.mixed_steps, r.most_in_step)
        table.add_row(*map(str, cells))
    return table


if __name__ == "__main__":
    main()
