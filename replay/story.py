"""The life of one version, shown: a share of an alias' conversations, all of them, back again, and out of service.

The version is made anew for each show, as what was retired never comes back: a canary's file under the next number.
"""

import asyncio
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from replay.canaries import Canary
from replay.chat import Chat, beginning, stream_together
from replay.checks import Checks
from replay.operator import Operator, OperatorError
from replay.tenant import Tenant
from streams.adapters.names import parse_adapter

SHARE, CONVERSATIONS = 0.5, 16


async def next_version(operator: Operator, adapter_id: str) -> str:
    """The id of the first version after all that its customer has ever had of this name."""
    name = parse_adapter(adapter_id)
    rows = [parse_adapter(row["adapter_id"]) for row in await operator.adapters()]
    newest = max((row.version for row in rows if (row.customer, row.name) == (name.customer, name.name)), default=0)
    return f"{name.customer}/{name.name}@{newest + 1}"


class Story:
    """`old` is where the alias points, `new` a version that is registered and that nothing points at."""

    def __init__(
        self, console: Console, url: str, operator: Operator, tenant: Tenant, alias: str, old: Canary, new: Canary
    ) -> None:
        self._console, self._url, self._operator, self._tenant = console, url, operator, tenant
        self._alias, self._old, self._new = alias, old, new

    async def tell(self, checks: Checks, question: str) -> list[Chat]:
        """All chats, in their order."""
        trial = await self._share(checks, question)
        moved = await self._moves(checks, question)
        await self._retires(checks, question)
        return [*trial, *moved]

    async def _share(self, checks: Checks, question: str) -> list[Chat]:
        await self._operator.set_alias(self._alias, self._new.adapter_id, SHARE)
        self._say(f"{SHARE:.0%} of {self._alias}'s conversations go to {self._new.adapter_id}")
        visitors = [f"visitor {number}" for number in range(1, CONVERSATIONS + 1)]
        first, second = await self._asked(visitors, question), await self._asked(visitors, question)
        served = Counter(chat.adapter for chat in first)
        for adapter_id, number in sorted(served.items()):
            self._say(f"  {adapter_id} has {number} of {len(first)} conversations")
        stayed = sum(one.adapter == other.adapter for one, other in zip(first, second, strict=True))
        checks.add("a conversation stays with its version", stayed == len(first), f"{stayed} of {len(first)}")
        checks.add("a share of them is with the new one", len(served) == 2, f"{served[self._new.adapter_id]}")
        return [*first, *second]

    async def _asked(self, visitors: list[str], question: str) -> list[Chat]:
        """A chat of each. Which version has it is for the gateway to say; its answer is held against that."""
        chats = [Chat(visitor, self._tenant, self._alias, question, None, visitor) for visitor in visitors]
        await asyncio.gather(*(chat.run(self._url) for chat in chats))
        for chat in chats:
            chat.expects = self._new if chat.adapter == self._new.adapter_id else self._old
        return chats

    async def _moves(self, checks: Checks, question: str) -> list[Chat]:
        chats = []
        for title, wanted in (("moved", self._new), ("back", self._old)):
            if wanted is self._new:
                await self._operator.set_alias(self._alias, wanted.adapter_id)
                self._say(f"{self._alias} moves to {wanted.adapter_id}")
            else:
                await self._operator.rollback(self._alias)
                self._say(f"{self._alias} is rolled back")
            chat = Chat(title, self._tenant, self._alias, question, wanted)
            await stream_together(self._console, self._url, [chat])
            chats.append(chat)
        right = sum(chat.text.strip() == chat.expects.marker for chat in chats if chat.expects)
        checks.add("who asks after a move, or after a rollback, gets that version", right == 2, f"{right} of 2")
        return chats

    async def _retires(self, checks: Checks, question: str) -> None:
        refused = await self._refusal(self._old.adapter_id)
        self._say(f"{self._old.adapter_id} is not retired: {refused or 'it was'}")
        await self._operator.retire(self._new.adapter_id)
        chat = Chat("after", self._tenant, self._new.adapter_id, question, None)
        await chat.run(self._url)
        self._say(f"{self._new.adapter_id} is retired; whoever names it: {beginning(chat.error, 60)}")
        gone = "404" in chat.error and not chat.text
        checks.add(
            "a version that an alias points at is not retired", bool(refused), "refused" if refused else "retired"
        )
        checks.add("a retired version serves nobody", gone, "404" if gone else chat.error or chat.text)
        self._say(f"what became of {self._new.adapter_id}:")
        for event in await self._operator.history("adapters", self._new.adapter_id):
            self._say(f"  {_line(event)}")

    async def _refusal(self, adapter_id: str) -> str:
        try:
            await self._operator.retire(adapter_id)
        except OperatorError as error:
            return error.said if error.status == 409 else ""
        return ""

    def _say(self, text: str) -> None:
        self._console.print(f"  {text}", highlight=False, soft_wrap=True)


def _line(event: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(event["at_unix_ms"] / 1000, UTC)
    of = f"{event['alias']} -> " if event["alias"] else ""
    share = f" for {event['share']:.0%}" if event["share"] < 1 else ""
    came = f", from {event['previous_adapter_id']}" if event["previous_adapter_id"] else ""
    return f"{at:%H:%M:%S}  {event['kind']:<10}  {of}{event['adapter_id']}{share}{came}"
