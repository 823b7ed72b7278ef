"""What ends in ClickHouse: one RequestFinished per accepted request, one AttemptFinished per attempt, cache events."""

import msgspec

from schemas.reasons import FinishReason, Outcome, Tier


class RequestFinished(msgspec.Struct, frozen=True, tag="request"):
    """Written by the gateway, once per request it accepted. ttft_ms counts from arrival over all attempts; -1: none.

    tpot_ms is the mean time per output token after the first; -1 with fewer than two tokens.
    """

    request_id: str
    at_unix_ms: int
    customer: str
    model: str
    adapter: str
    content_id: str
    tier: Tier
    outcome: Outcome
    gateway: int
    gateway_incarnation: int
    replica: int
    attempts: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float
    total_ms: float
    detail: str = ""


class AttemptFinished(msgspec.Struct, frozen=True, tag="attempt"):
    """Written by the worker, once per attempt that it admitted. Durations are -1 where that stage was not reached."""

    request_id: str
    attempt: int
    at_unix_ms: int
    customer: str
    adapter: str
    content_id: str
    slot: int
    epoch: int
    tier: Tier
    reason: FinishReason
    gateway: int
    gateway_incarnation: int
    replica: int
    incarnation: int
    prompt_tokens: int
    first_position: int
    output_tokens: int
    queue_ms: float
    load_ms: float
    first_token_ms: float
    total_ms: float


Ended = RequestFinished | AttemptFinished


class CacheEvent(msgspec.Struct, frozen=True):
    """An adapter arrived in, left, or failed to reach a tier of a replica; or, as a probe saw, is wrong there."""

    at_unix_ms: int
    replica: int
    incarnation: int
    adapter: str
    content_id: str
    event: str  # load | evict | fail | wrong
    tier: Tier  # the tier it arrived in or left
    source: Tier  # where a load found it; NONE for evictions
    bytes: int
    duration_ms: float
    reason: str = ""


class Usage(msgspec.Struct, frozen=True):
    """What one gateway used of a customer's limits since its last delta."""

    customer: str
    gateway: int
    gateway_incarnation: int
    requests: int
    tokens: int
    at_unix_ms: int
