"""The map: every topic, what is in it, how it is keyed, and how long it is kept.

Topics are created explicitly and verified at start (streams/bus/admin.py). `places` partitions: one per replica or
gateway place, written to by explicit partition. Compacted topics are tables: their newest record per key is the state.
"""

from typing import Any

import msgspec

from schemas.adapters import AdapterCommand, AdapterEvent, AdapterRecord, AliasRecord, CommandResult
from schemas.customers import Customer
from schemas.gateways import GatewayState
from schemas.placement import AdapterStats, OwnerPlan, ReplicaCommand
from schemas.replicas import ReplicaState
from schemas.requests import Request
from schemas.stats import CacheEvent, Ended, Usage
from schemas.tokens import TokenBatch

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


class Topic(msgspec.Struct, frozen=True):
    """`partitions` 0 stands for the number of replica places, -1 for that of gateway places: settings of the fleet.

    wire: "msgpack" on the hot path, "json" for everything a person may read with a console tool.
    retention_ms 0: compacted, kept for ever.
    linger_ms: how long a record may wait for company in its batch; only where nobody waits for the record.
    """

    name: str
    partitions: int
    key: str
    value: Any  # the type, or union of types, of its records
    wire: str
    retention_ms: int
    linger_ms: int = 0

    @property
    def compacted(self) -> bool:
        return self.retention_ms == 0


REPLICA_PLACES, GATEWAY_PLACES = 0, -1

REQUESTS = Topic("requests", REPLICA_PLACES, "request id", Request, "msgpack", HOUR_MS)
TOKENS = Topic("tokens", GATEWAY_PLACES, "none", TokenBatch, "msgpack", HOUR_MS)
ADAPTER_COMMANDS = Topic("adapter-commands", 8, "customer id", AdapterCommand, "json", 14 * DAY_MS)
ADAPTER_RESULTS = Topic("adapter-results", 8, "command id", CommandResult, "json", HOUR_MS)
ADAPTER_EVENTS = Topic("adapter-events", 8, "customer id", AdapterEvent, "json", 90 * DAY_MS)
ADAPTERS = Topic("adapters", 8, "adapter id", AdapterRecord, "json", 0)
ALIASES = Topic("aliases", 8, "alias", AliasRecord, "json", 0)
REPLICAS = Topic("replicas", 1, "replica", ReplicaState, "json", 0)
GATEWAYS = Topic("gateways", 1, "gateway", GatewayState, "json", 0)
OWNER_PLANS = Topic("owner-plans", 8, "adapter id", OwnerPlan, "json", 0)
USAGE = Topic("usage", 8, "customer id", Usage, "json", HOUR_MS)
ADAPTER_STATS = Topic("adapter-stats", 8, "adapter id", AdapterStats, "json", 0)
REPLICA_COMMANDS = Topic("replica-commands", REPLICA_PLACES, "command id", ReplicaCommand, "json", HOUR_MS)
CUSTOMERS = Topic("customers", 1, "customer id", Customer, "json", 0)
FINISHED = Topic("finished", 8, "customer id", Ended, "json", 7 * DAY_MS, linger_ms=100)
CACHE_EVENTS = Topic("cache-events", 8, "replica", CacheEvent, "json", 7 * DAY_MS, linger_ms=100)

TOPICS: tuple[Topic, ...] = (
    REQUESTS,
    TOKENS,
    ADAPTER_COMMANDS,
    ADAPTER_RESULTS,
    ADAPTER_EVENTS,
    ADAPTERS,
    ALIASES,
    REPLICAS,
    GATEWAYS,
    OWNER_PLANS,
    USAGE,
    ADAPTER_STATS,
    REPLICA_COMMANDS,
    CUSTOMERS,
    FINISHED,
    CACHE_EVENTS,
)
