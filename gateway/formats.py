"""Whether an output can be held to a schema: tried here, with the library and tokenizer that the engine has.

Owns the verdicts on the schemas that came last. A schema is tried beside the event loop, one at a time, so that many
that take long hold up each other alone.
"""

import asyncio
from collections import OrderedDict

from gateway.response_format import refusal
from streams.formats.grammars import Grammars
from streams.formats.schema import FormatRefused

MOST_VERDICTS = 256
MOST_BYTES = 1 << 20


class Formats:
    def __init__(self, grammars: Grammars) -> None:
        self._grammars, self._trying = grammars, asyncio.Lock()
        self._verdicts: OrderedDict[str, FormatRefused | None] = OrderedDict()
        self._bytes = 0

    async def check(self, schema: str) -> None:
        """Raises ApiError."""
        if not schema:
            return
        if schema not in self._verdicts:
            async with self._trying:
                if schema not in self._verdicts:
                    self._keep(schema, await asyncio.to_thread(self._try, schema))
        self._verdicts.move_to_end(schema)
        if (refused := self._verdicts[schema]) is not None:
            raise refusal(refused)

    def _try(self, schema: str) -> FormatRefused | None:
        try:
            self._grammars.start(schema)
        except FormatRefused as error:
            return error
        return None

    def _keep(self, schema: str, verdict: FormatRefused | None) -> None:
        self._verdicts[schema] = verdict
        self._bytes += len(schema)
        while len(self._verdicts) > MOST_VERDICTS or self._bytes > MOST_BYTES:
            self._bytes -= len(self._verdicts.popitem(last=False)[0])
