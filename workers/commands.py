"""`replica-commands` -> the engine's slots: what an operator, or the control plane, wants of this replica.

Commands are wishes: one that cannot be met is logged and answered by nothing; the next beat shows what is. Read from
this worker's start on: what was asked of an earlier holder of the place died with it.
"""

import logging
from collections.abc import Callable
from typing import NoReturn

from schemas.adapters import AdapterRecord
from schemas.placement import Drain, Load, ReplicaCommand, Unload
from schemas.reasons import AdapterStatus
from schemas.topics import REPLICA_COMMANDS
from streams.bus.errors import OffsetLost
from streams.bus.reader import Reader
from workers.loading import Loading

log = logging.getLogger(__name__)


async def obey(
    reader: Reader, adapter: Callable[[str], AdapterRecord | None], loading: Loading, drain: Callable[[], None]
) -> NoReturn:
    """For ever. `drain` makes the worker take nothing new; it stays until it is told to end."""
    while True:
        try:
            records = await reader.poll()
        except OffsetLost as lost:
            log.warning("commands were lost: %s", lost)
            reader.seek(REPLICA_COMMANDS, lost.partition, lost.end)
            continue
        for record in records:
            if record.value is not None:
                _do(record.value, adapter, loading, drain)


def _do(
    command: ReplicaCommand,
    adapter: Callable[[str], AdapterRecord | None],
    loading: Loading,
    drain: Callable[[], None],
) -> None:
    log.info("command %s", command)
    match command:
        case Drain():
            drain()
        case Load() | Unload():
            record = adapter(command.adapter_id)
            if record is None:
                log.warning("command %s: adapter %s is not known here", command.command_id, command.adapter_id)
            elif isinstance(command, Unload):
                loading.unload(record)
            elif record.status is not AdapterStatus.READY:
                log.warning("command %s: adapter %s is %s", command.command_id, command.adapter_id, record.status)
            else:
                loading.want(record)
