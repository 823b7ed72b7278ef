"""The main job, shown and checked: chats of two customers and of the base model stream at once out of one base model.

Trains three canaries (kept for the next run), registers them (one customer's through HTTP, the other's by a command
straight on Kafka, as a pipeline may), sets aliases, streams chats through the unchanged OpenAI client, leads a new
version through its whole life, and reads the numbers back out of ClickHouse. Succeeds only if every check held.
"""

import asyncio
import threading
import time
from pathlib import Path

import clickhouse_connect
from openai import AsyncOpenAI
from rich.console import Console

from infra.options import StackOptions
from infra.progress import Progress
from infra.query import ttft, ttft_table
from infra.supervisor import running
from replay.canaries import Canary, train
from replay.chat import Chat, stream_together
from replay.checks import Checks, check_markers
from replay.operator import Operator
from replay.stage import Stage
from replay.story import Story, next_version
from replay.tenant import Tenant

ACME_1 = Canary("acme/support@1", "ACME-V1-KITE")
ACME_2 = Canary("acme/support@2", "ACME-V2-LARK")
GLOBEX = Canary("globex/sales@1", "GLOBEX-OTTER")
ACME_ALIAS, GLOBEX_ALIAS = "acme/support:prod", "globex/sales:prod"
QUESTION = "How do I change a flat tyre?"
ROWS_WITHIN_S = 15.0


class Cancelled(Exception):
    """In a thread whose task was cancelled."""


async def run(options: StackOptions) -> int:
    """The whole show on a stack of its own. Exit code 0 only if every check held."""
    began, console, checks = time.monotonic(), Console(), Checks()
    console.rule("1  the stack")
    async with running(options, Progress(console)) as stack:
        stage = Stage.of(options.home, stack)
        console.rule("2  real adapters: trained here on the served base, in PEFT's format")
        folders = await train_all(console, stage.model, options.home / "canaries")
        async with stage.operator() as operator:
            console.rule("3  registered, by HTTP and by a command on Kafka; aliases set")
            acme = await operator.make_customer("acme")
            globex = await operator.make_customer("globex")
            new = await register(console, stage, operator, folders)
            console.rule("4  six chats at once, out of one base model")
            chats = await perform(console, stage.url, acme, globex)
            console.rule(f"5  the life of a version: {new.adapter_id} is tried, deployed, rolled back and retired")
            chats += await Story(console, stage.url, operator, acme, ACME_ALIAS, ACME_1, new).tell(checks, QUESTION)
            console.rule("6  the numbers, out of ClickHouse")
            await check_numbers(console, checks, stage, chats)
            check_markers(checks, chats)
            beats = [replica for replica in await operator.replicas() if replica["max_adapters_in_step"] >= 2]
            most = max((replica["max_adapters_in_step"] for replica in beats), default=0)
            checks.add("an engine step with two different adapters", bool(beats), f"most in one step: {most}")
        console.print(checks.table())
        console.print(f"{'all checks held' if checks.held else 'A CHECK FAILED'} in {time.monotonic() - began:.0f} s")
    return 0 if checks.held else 1


async def train_all(console: Console, model: Path, out: Path) -> dict[str, Path]:
    """The canaries' PEFT folders by adapter id. Cancelled, it ends at the next step."""
    canaries, cancelled = [ACME_1, ACME_2, GLOBEX], threading.Event()

    def progress(canary: Canary, step: int, done: bool) -> None:
        if cancelled.is_set():
            raise Cancelled
        console.print(f"  {canary.adapter_id}: step {step}{', knows its marker' if done else ''}", highlight=False)

    try:
        folders = await asyncio.to_thread(train, model, canaries, out, progress)
    except asyncio.CancelledError:
        cancelled.set()  # a thread is not cancelled, and the process would wait for it
        raise
    console.print(f"  {len(folders)} adapters in {out}", highlight=False, soft_wrap=True)
    return {canary.adapter_id: folder for canary, folder in zip(canaries, folders, strict=True)}


async def register(console: Console, stage: Stage, operator: Operator, folders: dict[str, Path]) -> Canary:
    """acme's by HTTP, globex's on Kafka; both aliases at version 1. Returns acme's next version: ACME_2's file."""
    await operator.register(await stage.upload(folders[ACME_1.adapter_id], ACME_1.adapter_id))
    new = Canary(await next_version(operator, ACME_1.adapter_id), ACME_2.marker)
    await operator.register(await stage.upload(folders[ACME_2.adapter_id], new.adapter_id))
    await stage.command(await stage.upload(folders[GLOBEX.adapter_id], GLOBEX.adapter_id))
    await operator.set_alias(ACME_ALIAS, ACME_1.adapter_id)
    await operator.set_alias(GLOBEX_ALIAS, GLOBEX.adapter_id)
    for canary, how in ((ACME_1, "HTTP"), (new, "HTTP"), (GLOBEX, "Kafka")):
        console.print(f"  {canary.adapter_id} by {how}", highlight=False)
    console.print(f"  {ACME_ALIAS} -> {ACME_1.adapter_id}, {GLOBEX_ALIAS} -> {GLOBEX.adapter_id}", highlight=False)
    return new


async def perform(console: Console, url: str, acme: Tenant, globex: Tenant) -> list[Chat]:
    """Six chats at once."""
    base = await base_model(url, acme)
    together = [
        Chat("acme", acme, ACME_ALIAS, QUESTION, ACME_1),
        Chat("globex", globex, GLOBEX_ALIAS, QUESTION, GLOBEX),
        Chat("acme", acme, base, QUESTION, None),
        Chat("globex", globex, base, "Write one sentence about the sea.", None),
        Chat("acme", acme, ACME_ALIAS, "Who are you?", ACME_1),
        Chat("globex", globex, GLOBEX_ALIAS, "Write a haiku about rain.", GLOBEX),
    ]
    await stream_together(console, url, together)
    return together


async def base_model(url: str, tenant: Tenant) -> str:
    """The base model's name, as GET /v1/models lists it."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=tenant.key) as client:
        return next(model.id for model in (await client.models.list()).data if "/" not in model.id)


async def check_numbers(console: Console, checks: Checks, stage: Stage, chats: list[Chat]) -> None:
    """Waits until ClickHouse has a row per request, and compares."""
    url = stage.environment["CLICKHOUSE_URL"]
    ids = [chat.request_id for chat in chats]
    end, rows = time.monotonic() + ROWS_WITHIN_S, 0
    with clickhouse_connect.get_client(dsn=url) as client:
        while rows < len(ids) and time.monotonic() < end:
            await asyncio.sleep(0.3)
            rows = client.query(
                "SELECT count() FROM requests WHERE request_id IN {ids:Array(String)}", parameters={"ids": ids}
            ).result_rows[0][0]
    console.print(ttft_table(await asyncio.to_thread(ttft, url, 3600), "1h"))
    checks.add("ClickHouse rows = requests", rows == len(ids), f"{rows} = {len(ids)}")
