"""The compacted table `replicas`: who holds each replica place, and how it is doing. Key: the place, as decimal text.

A holder first writes ReplicaClaim; the offset of that record is its incarnation, which every later beat carries. A beat
with a lower incarnation than the newest claim's comes from a holder that was replaced and is ignored.
"""

from enum import StrEnum

import msgspec

from schemas.reasons import Tier
from schemas.tokens import LoadReport

ENGINE_CRASHED = "engine crashed"  # the reason in a GONE beat when the engine died under its worker


class ReplicaStatus(StrEnum):
    READY = "ready"
    DRAINING = "draining"  # ends what it has, takes nothing new
    GONE = "gone"  # its last word: every open attempt of it may be re-driven at once


class ReplicaClaim(msgspec.Struct, frozen=True, tag="claim"):
    """The base is loaded and `requests` is read from `start_offset` on. `nonce` tells the writer its own record."""

    replica: int
    nonce: str
    start_offset: int
    base_hash: str
    numeric_class: str
    at_unix_ms: int


class Residency(msgspec.Struct, frozen=True, omit_defaults=True):
    """Adapter ids by place, most recently used first, and how hard they chase each other."""

    gpu_adapters: list[str] = []
    ram_adapters: list[str] = []
    disk_adapters: list[str] = []
    loads_per_min: float = 0.0
    evictions_per_min: float = 0.0


class TierReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the tiers hold and how they fare.

    `slot_leases`: of sequences on slots; `kv_blocks`: of the KV cache, that sequences hold; `file_leases`: of loads on
    files and images. `loads`: on their way. `missing`: adapters that the replica owns and would pull into RAM.
    `thrashing`: the tiers in which loads chase evictions. `incidents`: leases without a live holder, or rows without a
    lease, found since its start; `incident`: the last.
    """

    gpu_bytes: int = 0
    ram_bytes: int = 0
    ram_limit_bytes: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    slot_leases: int = 0
    file_leases: int = 0
    loads: int = 0
    missing: int = 0
    thrashing: list[Tier] = []
    incidents: int = 0
    incident: str = ""
    kv_blocks: int = 0


class Answered(StrEnum):
    DONE = "done"
    IN_USE = "in_use"  # attempts run with the adapter or wait for it, or it is just being loaded
    NOT_THERE = "not_there"
    FAILED = "failed"


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a command. `reason`: why not; `lasting`: nor will it if it is only tried again."""

    command_id: str
    outcome: Answered
    reason: str = ""
    lasting: bool = False


class FailedLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    adapter_id: str
    reason: str
    at_unix_ms: int
    lasting: bool = False


class ReplicaBeat(msgspec.Struct, frozen=True, tag="beat"):
    """Once a second while the engine steps or ticks; a hung engine stops it.

    `step` is the engine's last completed step. `capacity_tokens` is the most tokens in flight it is meant to carry:
    beyond that it counts as overloaded. `mixed_steps` counts steps whose rows had two or more different adapters, and
    `max_adapters_in_step` is the most that one step had. `answers`: to the last commands, the newest last, each in
    beats enough to be seen. `failed_loads`: the newest first, one of each adapter, until it is loaded after all.
    """

    replica: int
    incarnation: int
    start_offset: int
    beat: int
    status: ReplicaStatus
    step: int
    load: LoadReport
    residency: Residency
    base_hash: str
    numeric_class: str
    capacity_tokens: int
    at_unix_ms: int
    mixed_steps: int = 0
    max_adapters_in_step: int = 0
    reason: str = ""
    tiers: TierReport = TierReport()
    answers: list[Answer] = []
    failed_loads: list[FailedLoad] = []


ReplicaState = ReplicaClaim | ReplicaBeat
