"""Everything a worker is told from outside: one frozen struct, read from the environment, printed once."""

import os
from collections.abc import Mapping
from typing import Self

import msgspec

from streams.adapters.locations import InvalidLocation, parse_location
from streams.adapters.store import S3Settings
from streams.bus.settings import KafkaSettings
from streams.tracing import settings as tracing
from workers.engine.kv_blocks import BLOCK_TOKENS
from workers.slot_image import slot_pools

ENGINES = ("torch", "simulated")


class SettingsError(Exception):
    """Names the variable, its value and what would be accepted."""


class WorkerSettings(msgspec.Struct, frozen=True):
    """`replica` is this worker's place. `take_over`: its starter saw the last holder die.

    `slot_pools`: rank:slots,... instead of `slots` of the largest rank. `memory_bytes`: of the engine's device, for
    base, KV cache, workspace and slots: fewer slots are made if they do not fit; 0 is unbounded.
    `kv_tokens`: positions in the engine's KV cache. `max_open`: attempts here at once, beyond which they are refused.
    `capacity_tokens`: tokens in flight beyond which gateways count it as overloaded. `store`: where canonical
    adapters lie. `data`: folder of the disk tier. `pull_bytes_per_s`: what it may take to bring what it owns ahead of
    requests; 0: it brings nothing.
    `step_ms`, `load_ms`: what a step and a load take in the simulated engine. `drain_s`: for what runs at SIGTERM.
    `traces`: where spans go; empty: nowhere.
    """

    kafka: KafkaSettings
    replica: int
    take_over: bool
    model: str
    engine: str
    threads: int
    slots: int
    slot_pools: str
    max_rank: int
    kv_tokens: int
    memory_bytes: int
    max_open: int
    capacity_tokens: int
    store: str
    s3: S3Settings
    data: str
    ram_bytes: int
    disk_bytes: int
    pull_bytes_per_s: int
    step_ms: float
    load_ms: float
    drain_s: float
    traces: str

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Raises SettingsError, or that of streams.bus."""
        kafka = KafkaSettings.from_env(env)
        model = env.get("LORAFLEET_MODEL", "")
        if not os.path.isfile(os.path.join(model, "config.json")):
            raise SettingsError(
                f"LORAFLEET_MODEL={model} is not a folder with config.json: name the base model's folder"
            )
        engine = env.get("WORKER_ENGINE", "torch")
        if engine not in ENGINES:
            raise SettingsError(f"WORKER_ENGINE={engine} is unknown: give one of {', '.join(ENGINES)}")
        store = env.get("LORAFLEET_STORE", "")
        try:
            parse_location(store)
        except InvalidLocation as error:
            raise SettingsError(f"LORAFLEET_STORE={store}: {error}; name where adapters are kept") from None
        kv_tokens = _whole(env, "WORKER_KV_TOKENS", 16_384, 2 * BLOCK_TOKENS)  # its self-check takes two
        slots, max_rank = _whole(env, "WORKER_SLOTS", 8, 1), _whole(env, "LORAFLEET_MAX_RANK", 16, 1)
        pools = env.get("WORKER_SLOT_POOLS", "")
        try:
            slot_pools(slots, max_rank, pools)
        except ValueError as error:
            raise SettingsError(f"WORKER_SLOT_POOLS={pools}, LORAFLEET_MAX_RANK={max_rank}: {error}") from None
        replica = _whole(env, "WORKER_REPLICA", None, 0)
        if replica >= kafka.replica_places:
            raise SettingsError(
                f"WORKER_REPLICA={replica} is not below LORAFLEET_REPLICA_PLACES={kafka.replica_places}"
            )
        return cls(
            kafka=kafka,
            replica=replica,
            take_over=_flag(env, "WORKER_TAKE_OVER"),
            model=model,
            engine=engine,
            threads=_whole(env, "WORKER_THREADS", os.cpu_count() or 1, 1),
            slots=slots,
            slot_pools=pools,
            max_rank=max_rank,
            kv_tokens=kv_tokens,
            memory_bytes=_whole(env, "WORKER_MEMORY_BYTES", 0, 0),
            max_open=_whole(env, "WORKER_MAX_OPEN", 256, 1),
            capacity_tokens=_whole(env, "WORKER_CAPACITY_TOKENS", 2 * kv_tokens, 1),
            store=store,
            s3=S3Settings.from_env(env),
            data=env.get("WORKER_DATA", os.path.join(env.get("LORAFLEET_HOME", ".lorafleet"), f"worker-{replica}")),
            ram_bytes=_whole(env, "WORKER_RAM_BYTES", 1 << 30, 0),
            disk_bytes=_whole(env, "WORKER_DISK_BYTES", 10 << 30, 0),
            pull_bytes_per_s=_whole(env, "WORKER_PULL_BYTES_PER_S", 32 << 20, 0),
            step_ms=_number(env, "WORKER_STEP_MS", 0.0),
            load_ms=_number(env, "WORKER_LOAD_MS", 0.0),
            drain_s=_number(env, "WORKER_DRAIN_S", 10.0),
            traces=tracing.endpoint(env),
        )

    @property
    def slot_ranks(self) -> tuple[int, ...]:
        """The ranks of the slots' pools, going up."""
        return tuple(slot_pools(self.slots, self.max_rank, self.slot_pools))


def _whole(env: Mapping[str, str], name: str, default: int | None, least: int) -> int:
    text = env.get(name, "" if default is None else str(default))
    if not text.isdecimal() or int(text) < least:
        raise SettingsError(f"{name}={text} is not a whole number of at least {least}")
    return int(text)


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise SettingsError(f"{name}={text} is not a number of at least 0")
    return value


def _flag(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "0")
    if text not in ("0", "1", ""):
        raise SettingsError(f"{name}={text} is neither 0 nor 1")
    return text == "1"
