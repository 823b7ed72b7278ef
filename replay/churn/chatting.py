"""Chats with aliases and versions that change meanwhile; each answer is held against all voices there are."""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

import aiohttp

from replay.churn.cast import ASKED, Cast
from replay.churn.changes import Changes
from replay.churn.truth import Truth
from replay.streams import Script, Take, take
from replay.tenant import Tenant

ALIASED = 0.8  # of the chats name an alias, the others a version
PATIENCE_S = 60.0


class Chatting:
    """`seen` counts how they ended, `wrong` tells each that must not be."""

    def __init__(
        self, urls: Sequence[str], tenant: Tenant, cast: Cast, truth: Truth, changes: Changes, tokens: int, seed: int
    ) -> None:
        self._urls, self._tenant, self._cast, self._truth, self._changes = urls, tenant, cast, truth, changes
        self._tokens, self._draw = tokens, random.Random(seed)
        self._aliases = changes.aliases
        self.seen: Counter[str] = Counter()
        self.tiers: Counter[str] = Counter()
        self.again = 0  # chats that a fleet without a replica refused for the moment
        self.wrong: list[str] = []

    async def go_on(self, requests: int, at_once: int, told: Callable[[int], None]) -> None:
        numbers = itertools.count()
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

            async def visitor() -> None:
                while (number := next(numbers)) < requests:
                    await self._chat(session, self._urls[number % len(self._urls)])
                    told(sum(self.seen.values()))

            async with asyncio.TaskGroup() as visitors:
                for _ in range(at_once):
                    visitors.create_task(visitor())

    async def _chat(self, session: aiohttp.ClientSession, url: str) -> None:
        names = self._aliases if self._draw.random() < ALIASED else self._changes.versions
        script = Script(self._tenant.key, self._draw.choice(names), self._draw.choice(ASKED), self._tokens)
        until = time.monotonic() + PATIENCE_S
        while True:
            seen = await take(session, url, script)
            if not seen.error.startswith("503") or time.monotonic() > until:
                break
            self.again += 1
            await asyncio.sleep(0.3)
        answered = seen.times[0] if seen.times else time.monotonic()
        ended = self.judge(seen, answered)
        self.seen[ended] += 1
        self.tiers[seen.tier] += 1

    def judge(self, seen: Take, answered: float) -> str:
        """How it ended. By what was said; the label is only compared."""
        model, label = seen.script.model, seen.adapter
        if seen.error.startswith("404") and self._truth.gone(model, answered):
            return "retired, 404"
        if not seen.whole:
            return self._bad("broken", seen, seen.error or seen.finish)
        voice = self._cast.heard(seen.script.prompt, seen)
        right = self._truth.right(model, seen.asked_at, answered)
        if voice < 0:
            return self._bad("nobody's words", seen, seen.text[:60])
        if voice not in {self._truth.voices[version] for version in right}:
            spoken = [version for version, other in self._truth.voices.items() if other == voice]
            return self._bad("wrong or stale version", seen, f"spoke as {spoken}, right were {sorted(right)}")
        if label not in right or self._truth.voices[label] != voice:
            return self._bad("wrong label", seen, f"right were {sorted(right)}")
        return "right"

    def _bad(self, kind: str, seen: Take, why: str) -> str:
        self.wrong.append(f"{kind}: {seen.request_id} asked for {seen.script.model}, labelled {seen.adapter}: {why}")
        return kind
