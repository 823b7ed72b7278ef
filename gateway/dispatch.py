"""Topic `requests`: Submit and Cancel to the partition of the replica that is to read them.

Owns nothing but what is on its way. Ordering kept: a partition gets its records in the order of the calls, so that no
Cancel overtakes its Submit. What became of a Submit is told once, by `written` or `unwritten`; a Cancel that is lost is
made good by the deadline at the worker. A crash: workers hear the gateway's silence and cancel what they run for it.
"""

import asyncio
import logging
from collections.abc import Callable

from schemas.requests import Cancel, Submit
from schemas.topics import REQUESTS
from streams.bus.errors import NotWritten
from streams.bus.reader import Headers
from streams.bus.writer import Writer, Written

log = logging.getLogger(__name__)


class Dispatch:
    """`written(request_id, attempt, offset)`, `unwritten(request_id, attempt)`: called later, never inside a call."""

    def __init__(
        self, writer: Writer, written: Callable[[str, int, int], None], unwritten: Callable[[str, int], None]
    ) -> None:
        self._writer, self._written, self._unwritten = writer, written, unwritten

    def submit(self, submit: Submit, headers: Headers = ()) -> None:
        loop = asyncio.get_running_loop()
        try:
            fate = self._writer.send_nowait(
                REQUESTS, submit, key=submit.request_id, partition=submit.replica, headers=headers
            )
        except (NotWritten, ValueError) as error:  # too many wait already, or it is too large for a record
            log.warning("request %s: not sent: %s", submit.request_id, error)
            loop.call_soon(self._unwritten, submit.request_id, submit.attempt)
            return

        def tell(fate: asyncio.Future[Written]) -> None:
            if fate.cancelled() or fate.exception() is not None:
                self._unwritten(submit.request_id, submit.attempt)
            else:
                self._written(submit.request_id, submit.attempt, fate.result().offset)

        fate.add_done_callback(tell)

    def cancel(self, replica: int, cancel: Cancel) -> None:
        try:
            self._writer.send_nowait(REQUESTS, cancel, key=cancel.request_id, partition=replica)
        except NotWritten as error:
            log.warning("cancel of %s: not sent: %s", cancel.request_id, error)
