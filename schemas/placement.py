"""Where adapters live: owner plans (compacted, key adapter id), adapter stats, and the commands that move adapters."""

import msgspec


class OwnerPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """Overrides the default of two owners for one adapter."""

    adapter_id: str
    owners: int = 2
    merged: bool = False
    pins: list[int] = []
    updated_unix_ms: int = 0


class AdapterStats(msgspec.Struct, frozen=True):
    """One window of one adapter."""

    adapter_id: str
    window_start_unix_ms: int
    requests: int
    tokens_per_s: float
    gpu_hit_rate: float


class Load(msgspec.Struct, frozen=True, tag="load"):
    command_id: str
    adapter_id: str


class Unload(msgspec.Struct, frozen=True, tag="unload", omit_defaults=True):
    """Refused while attempts use the adapter. With `drain_s` they are waited for that long; new ones go elsewhere."""

    command_id: str
    adapter_id: str
    drain_s: float = 0.0


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    command_id: str


ReplicaCommand = Load | Unload | Drain
