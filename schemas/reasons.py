"""The closed lists of why things end, where adapters are found and what states things are in."""

from enum import StrEnum


class Tier(StrEnum):
    """Where an attempt's adapter was found at admission. NONE: the base model, which needs no adapter."""

    NONE = "none"
    GPU = "gpu"
    RAM = "ram"
    DISK = "disk"
    REMOTE = "remote"


class FinishReason(StrEnum):
    """Why an admitted attempt ended on its worker."""

    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens or the context's end
    CANCELLED = "cancelled"  # the gateway asked for it
    DEADLINE = "deadline"
    GATEWAY_LOST = "gateway_lost"  # nobody is left to read the tokens
    LOAD_FAILED = "load_failed"  # the adapter could not be brought into a slot
    ERROR = "error"  # this sequence failed in the engine; its neighbours did not


class RejectReason(StrEnum):
    """Why a worker did not take a Submit."""

    STALE = "stale"  # meant for another incarnation of this replica, or written before its start offset
    DRAINING = "draining"
    OVERLOADED = "overloaded"
    DEADLINE = "deadline"
    GATEWAY_LOST = "gateway_lost"
    BASE_MISMATCH = "base_mismatch"
    UNKNOWN_ADAPTER = "unknown_adapter"
    CONTENT_MISMATCH = "content_mismatch"  # the adapter id stands for other bytes here than at the gateway
    RETIRED = "retired"
    QUARANTINED = "quarantined"
    TOO_LONG = "too_long"


class Outcome(StrEnum):
    """How an accepted request ended, as its client saw it."""

    OK = "ok"
    CANCELLED = "cancelled"  # the client went away
    DEADLINE = "deadline"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"  # no live replica, or the broker away
    FAILED = "failed"  # an error, or the re-drives used up
    GATEWAY_LOST = "gateway_lost"  # its gateway died; written by the reconciler


class AdapterStatus(StrEnum):
    READY = "ready"
    RETIRED = "retired"
    QUARANTINED = "quarantined"


class EventKind(StrEnum):
    """What became of a command for an adapter or an alias."""

    REGISTERED = "registered"
    RETIRED = "retired"
    QUARANTINED = "quarantined"
    RELEASED = "released"
    WARMING = "warming"  # an alias will point elsewhere once that is warm
    MOVED = "moved"  # an alias is new, or points elsewhere
    TRIED = "tried"  # a share of an alias' conversations goes to another version
    KEPT = "kept"  # it did not get warm, was called off, or failed on trial: the alias stays
    REFUSED = "refused"


class Role(StrEnum):
    """What an API key may do."""

    CUSTOMER = "customer"  # chat with its own customer's models
    PIPELINE = "pipeline"  # register its own customer's adapters and set their aliases
    OPERATOR = "operator"  # everything under /internal
