"""The main job, shown and checked: chats of two customers and of the base model stream at once out of one base model.

Trains three canaries (kept for the next run), registers them (one customer's through HTTP, the other's by a command
straight on Kafka, as a pipeline may), sets aliases, streams chats through the unchanged OpenAI client, switches an
alias to a new version between two requests, and reads the numbers back out of ClickHouse. Succeeds only if every check
held.
"""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import clickhouse_connect
from openai import AsyncOpenAI
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from infra.options import StackOptions
from infra.progress import Progress
from infra.query import ttft, ttft_table
from infra.supervisor import running
from replay.canaries import Canary, train
from replay.operator import Operator
from replay.stage import Stage
from replay.tenant import Tenant

ACME_1 = Canary("acme/support@1", "ACME-V1-KITE")
ACME_2 = Canary("acme/support@2", "ACME-V2-LARK")
GLOBEX = Canary("globex/sales@1", "GLOBEX-OTTER")
ACME_ALIAS, GLOBEX_ALIAS = "acme/support:prod", "globex/sales:prod"
QUESTION = "How do I change a flat tyre?"
BASE_TOKENS = 48
SHOWN = 22  # characters of an answer, where it does not appear as it streams
ROWS_WITHIN_S = 15.0


@dataclass
class Chat:
    """One streamed chat as its client saw it. `expects`: the canary whose marker it must carry, if any."""

    title: str
    tenant: Tenant
    model: str
    question: str
    expects: Canary | None
    text: str = ""
    adapter: str = ""
    tier: str = ""
    ttft_ms: float = 0.0
    request_id: str = ""
    error: str = ""

    async def run(self, url: str) -> None:
        """Streams it through the OpenAI client; what goes wrong is kept in `error`."""
        started = time.monotonic()
        try:
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key=self.tenant.key, max_retries=0) as client:
                answer = await client.chat.completions.with_raw_response.create(
                    model=self.model,
                    messages=[{"role": "user", "content": self.question}],
                    max_tokens=BASE_TOKENS,
                    temperature=0,
                    stream=True,
                )
                self.request_id = answer.headers.get("x-request-id", "")
                self.adapter = answer.headers.get("x-adapter-id", "")
                self.tier = answer.headers.get("x-adapter-tier", "")
                async for chunk in answer.parse():
                    if chunk.choices and chunk.choices[0].delta.content:
                        self.ttft_ms = self.ttft_ms or (time.monotonic() - started) * 1000
                        self.text += chunk.choices[0].delta.content
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def panel(self) -> Panel:
        state = f"{self.adapter or '…'}  tier {self.tier or '…'}  ttft {self.ttft_ms:.0f} ms"
        return Panel(Text(self.error or self.text or " "), title=f"{self.title} · {self.model}", subtitle=state)


@dataclass
class Checks:
    """What must hold, and whether it did."""

    rows: list[tuple[str, bool, str]] = field(default_factory=list)

    def add(self, what: str, held: bool, seen: str) -> None:
        self.rows.append((what, held, seen))

    @property
    def held(self) -> bool:
        return all(held for _, held, _ in self.rows)

    def table(self) -> Table:
        table = Table("check", "seen", "", title="Checks")
        for what, held, seen in self.rows:
            table.add_row(what, seen, "[green]held[/]" if held else "[red]FAILED[/]")
        return table


async def stream_together(console: Console, url: str, chats: list[Chat]) -> None:
    """Runs the chats at once, showing them as they come; on a pipe each is printed when it is complete."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(chat.run(url), name=chat.title) for chat in chats]
        if console.is_terminal:
            with Live(console=console, refresh_per_second=12) as live:
                while not all(task.done() for task in tasks):
                    live.update(Group(*(chat.panel() for chat in chats)))
                    await asyncio.sleep(0.08)
                live.update(Group(*(chat.panel() for chat in chats)))
    if not console.is_terminal:
        for chat in chats:
            console.print(
                f"  {chat.title:<8} {chat.model:<24} adapter {chat.adapter:<16} tier {chat.tier:<7}"
                f" ttft {chat.ttft_ms:6.0f} ms  {chat.error or _beginning(chat.text)!r}",
                soft_wrap=True,
            )


def _beginning(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def check_markers(checks: Checks, chats: list[Chat]) -> None:
    """Each marker is the whole of its own streams, and nowhere in any other."""
    markers = {canary.marker for chat in chats if (canary := chat.expects)}
    own = sum(chat.text.strip() == chat.expects.marker for chat in chats if chat.expects)
    wanted = sum(chat.expects is not None for chat in chats)
    checks.add("each canary's chats answer with its marker", own == wanted, f"{own} of {wanted}")
    leaks = [
        f"{marker} in {chat.model}"
        for chat in chats
        for marker in markers
        if marker in chat.text and (chat.expects is None or chat.expects.marker != marker)
    ]
    checks.add("no marker in anyone else's chat", not leaks, ", ".join(leaks) or f"0 in {len(chats)} chats")
    wrong = [chat.model for chat in chats if chat.adapter != (chat.expects.adapter_id if chat.expects else "none")]
    checks.add("x-adapter-id names the adapter that answered", not wrong, ", ".join(wrong) or "in every chat")
    failed = [f"{chat.model}: {chat.error}" for chat in chats if chat.error or not chat.text]
    checks.add("every chat was answered", not failed, "; ".join(failed) or f"{len(chats)} of {len(chats)}")


async def run(options: StackOptions) -> int:
    """The whole show on a stack of its own. Exit code 0 only if every check held."""
    began, console, checks = time.monotonic(), Console(), Checks()
    console.rule("1  the stack")
    async with running(options, Progress(console)) as stack:
        stage = Stage.of(options.home, stack)
        console.rule("2  real adapters: trained here on the served base, in PEFT's format")
        folders = await asyncio.to_thread(train_all, console, stage.model, options.home / "canaries")
        async with stage.operator() as operator:
            console.rule("3  registered, by HTTP and by a command on Kafka; aliases set")
            acme = await operator.make_customer("acme")
            globex = await operator.make_customer("globex")
            await register(console, stage, operator, folders)
            chats = await perform(console, stage.url, operator, acme, globex)
            console.rule("6  the numbers, out of ClickHouse")
            await check_numbers(console, checks, stage, chats)
            check_markers(checks, chats)
            beats = [replica for replica in await operator.replicas() if replica["max_adapters_in_step"] >= 2]
            most = max((replica["max_adapters_in_step"] for replica in beats), default=0)
            checks.add("an engine step with two different adapters", bool(beats), f"most in one step: {most}")
        console.print(checks.table())
        console.print(f"{'all checks held' if checks.held else 'A CHECK FAILED'} in {time.monotonic() - began:.0f} s")
    return 0 if checks.held else 1


def train_all(console: Console, model: Path, out: Path) -> dict[str, Path]:
    """The canaries' PEFT folders by adapter id."""
    canaries = [ACME_1, ACME_2, GLOBEX]

    def progress(canary: Canary, step: int, done: bool) -> None:
        console.print(f"  {canary.adapter_id}: step {step}{', knows its marker' if done else ''}", highlight=False)

    folders = train(model, canaries, out, progress)
    console.print(f"  {len(folders)} adapters in {out}", highlight=False, soft_wrap=True)
    return {canary.adapter_id: folder for canary, folder in zip(canaries, folders, strict=True)}


async def register(console: Console, stage: Stage, operator: Operator, folders: dict[str, Path]) -> None:
    """acme's by HTTP, globex's on Kafka; both aliases at version 1."""
    for canary in (ACME_1, ACME_2):
        await operator.register(await stage.upload(folders[canary.adapter_id], canary.adapter_id))
    await stage.command(await stage.upload(folders[GLOBEX.adapter_id], GLOBEX.adapter_id))
    await operator.set_alias(ACME_ALIAS, ACME_1.adapter_id)
    await operator.set_alias(GLOBEX_ALIAS, GLOBEX.adapter_id)
    for canary, how in ((ACME_1, "HTTP"), (ACME_2, "HTTP"), (GLOBEX, "Kafka")):
        console.print(f"  {canary.adapter_id} by {how}", highlight=False)
    console.print(f"  {ACME_ALIAS} -> {ACME_1.adapter_id}, {GLOBEX_ALIAS} -> {GLOBEX.adapter_id}", highlight=False)


async def perform(console: Console, url: str, operator: Operator, acme: Tenant, globex: Tenant) -> list[Chat]:
    """Six chats at once, then the same question before and after an alias is switched."""
    base = await base_model(url, acme)
    console.rule("4  six chats at once, out of one base model")
    together = [
        Chat("acme", acme, ACME_ALIAS, QUESTION, ACME_1),
        Chat("globex", globex, GLOBEX_ALIAS, QUESTION, GLOBEX),
        Chat("acme", acme, base, QUESTION, None),
        Chat("globex", globex, base, "Write one sentence about the sea.", None),
        Chat("acme", acme, ACME_ALIAS, "Who are you?", ACME_1),
        Chat("globex", globex, GLOBEX_ALIAS, "Write a haiku about rain.", GLOBEX),
    ]
    await stream_together(console, url, together)
    console.rule(f"5  {ACME_ALIAS} moves from version 1 to 2, between two requests")
    before = Chat("before", acme, ACME_ALIAS, QUESTION, ACME_1)
    await stream_together(console, url, [before])
    await operator.set_alias(ACME_ALIAS, ACME_2.adapter_id)
    after = Chat("after", acme, ACME_ALIAS, QUESTION, ACME_2)
    await stream_together(console, url, [after])
    return [*together, before, after]


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
