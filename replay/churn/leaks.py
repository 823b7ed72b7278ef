"""What is left when all is quiet: leases, rows, bytes and files that nobody has any more. All of it must be none."""

import asyncio
import hashlib
import time
from pathlib import Path

import msgspec

from replay.operator import Operator
from replay.stage import Stage
from workers.loader.folders import SHARED_MEMORY

QUIET_WITHIN_S = 90.0
BUSY = (
    "running", "queue_depth", "tokens_in_flight", "slot_leases", "kv_blocks", "file_leases", "loads_on_their_way",
)  # fmt: skip


class Leaks(msgspec.Struct, frozen=True):
    """`rows` and `leases`: still there though nothing runs. `incidents`: differences that the replicas' audits found.

    `blocks`: of the KV cache. `slot_bytes`: counted as in slots once every adapter was unloaded; `file_bytes`: by how
    much the files of the disk and RAM tiers differ from what is counted; `strays`: parts of files, and folders of dead
    lives in shared memory.
    """

    rows: int
    leases: int
    blocks: int
    incidents: int
    slot_bytes: int
    file_bytes: int
    strays: int

    @property
    def none(self) -> bool:
        return not any(msgspec.structs.astuple(self))


async def look(stage: Stage, operator: Operator) -> Leaks:
    """Waits until nothing runs, and empties all slots."""
    await _quiet(operator)
    states = await operator.replicas()
    for state in states:
        for adapter_id in state["gpu_adapters"]:
            await operator.unload(int(state["replica_id"]), adapter_id)
    await asyncio.sleep(2.5)  # two beats
    states = await operator.replicas()
    files, strays = 0, 0
    for state in states:
        worker = stage.home / f"worker-{state['replica_id']}"
        (difference, astray) = await asyncio.to_thread(_files, worker, state["bytes"])
        files, strays = files + difference, strays + astray
    return Leaks(
        rows=sum(state["running"] + state["queue_depth"] for state in states),
        leases=sum(state["slot_leases"] + state["file_leases"] for state in states),
        blocks=sum(state["kv_blocks"] for state in states),
        incidents=sum(state["lease_incidents"] for state in states),
        slot_bytes=sum(state["bytes"]["gpu"] for state in states),
        file_bytes=files,
        strays=strays,
    )


async def _quiet(operator: Operator) -> None:
    """Until every replica says twice that it does nothing, or for as long as it may take."""
    end, quiet = time.monotonic() + QUIET_WITHIN_S, 0
    while quiet < 2 and time.monotonic() < end:
        await asyncio.sleep(1.5)
        states = await operator.replicas()
        idle = all(state["status"] == "ready" and not any(state[name] for name in BUSY) for state in states)
        quiet = quiet + 1 if idle else 0


def _files(worker: Path, told: dict[str, int]) -> tuple[int, int]:
    """(bytes of both tiers that files and books differ by, files and folders that belong to nobody)."""
    disk = list((worker / "adapters").iterdir())
    parts = [path for path in disk if path.suffix != ".safetensors"]
    whose = hashlib.sha256(str(worker.absolute()).encode()).hexdigest()[:16]
    lives = list(SHARED_MEMORY.glob(f"*lorafleet-{whose}-*"))
    images = [path for life in lives for path in life.iterdir()]
    on_disk = sum(path.stat().st_size for path in disk if path not in parts)
    in_memory = sum(path.stat().st_size for path in images)
    return abs(on_disk - told["disk"]) + abs(in_memory - told["ram"]), len(parts) + max(0, len(lives) - 1)
