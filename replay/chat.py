"""A streamed chat as its client saw it, through the unchanged OpenAI client; several at once, shown as they come."""

import asyncio
import time
from dataclasses import dataclass

from openai import AsyncOpenAI, omit
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from replay.canaries import Canary
from replay.tenant import Tenant

MOST_TOKENS = 48
SHOWN = 22  # characters of an answer, where it does not appear as it streams


@dataclass
class Chat:
    """`expects`: the canary whose marker it must carry, if any."""

    title: str
    tenant: Tenant
    model: str
    question: str
    expects: Canary | None
    conversation: str = ""  # the client's own name for it, as `user`
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
                    max_tokens=MOST_TOKENS,
                    temperature=0,
                    user=self.conversation or omit,
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


async def stream_together(console: Console, url: str, chats: list[Chat]) -> None:
    """Runs the chats at once, showing them as they come; on a pipe each is printed when all are complete."""
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
                f" ttft {chat.ttft_ms:6.0f} ms  {chat.error or beginning(chat.text)!r}",
                soft_wrap=True,
            )


def beginning(text: str, most: int = SHOWN) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
