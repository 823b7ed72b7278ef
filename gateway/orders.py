"""Commands to replicas, and what they answer: topic `replica-commands`, answered in the beats.

Owns who waits. Ordering relied on: the table's, which has every beat. Answers are the replica's own: only it knows what
runs there. A replica that ends while it is waited for answers nothing more, which is found out within LOOK_S. A crash
of the gateway forgets who waits; what was asked is done or not, and the state shows which.
"""

import asyncio
import contextlib
import time

from gateway.errors import ApiError
from gateway.fleet import Fleet
from schemas.placement import ReplicaCommand
from schemas.replicas import Answer, ReplicaBeat
from schemas.topics import REPLICA_COMMANDS
from streams.bus.errors import BusUnavailable, NotWritten
from streams.bus.writer import Writer

SEND_LIMIT_S, LOOK_S = 5.0, 0.25


class Orders:
    """`heard` is told of each live beat."""

    def __init__(self, writer: Writer, fleet: Fleet) -> None:
        self._writer, self._fleet = writer, fleet
        self._waiting: dict[str, asyncio.Future[Answer]] = {}  # by command id

    def heard(self, beat: ReplicaBeat) -> None:
        for answer in beat.answers:
            waiting = self._waiting.get(answer.command_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

    async def tell(self, place: int, command: ReplicaCommand, wait_s: float) -> Answer | None:
        """The replica's answer; None if it has given none within `wait_s`. Raises ApiError (503, 504)."""
        incarnation = self._live(place)
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[command.command_id] = waiting
        end = time.monotonic() + wait_s
        try:
            try:
                await self._writer.send(
                    REPLICA_COMMANDS, command, key=command.command_id, partition=place, timeout_s=SEND_LIMIT_S
                )
            except NotWritten as error:
                raise ApiError("broker", f"the command was not sent: {error}") from None
            except BusUnavailable as error:
                raise ApiError("unconfirmed", f"the command may not have been sent: {error}") from None
            while (left_s := end - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    return await asyncio.wait_for(asyncio.shield(waiting), min(left_s, LOOK_S))
                if self._live(place) != incarnation:
                    raise ApiError("no_replica", f"replica {place} was replaced before it answered", "replica_id")
            return None
        finally:
            del self._waiting[command.command_id]

    def _live(self, place: int) -> int:
        """The incarnation that holds the place. Raises ApiError (503)."""
        holder = self._fleet.holders.get(place)
        if holder is None or holder.gone or holder.lost:
            raise ApiError("no_replica", f"replica {place} is not live", "replica_id")
        return holder.incarnation
