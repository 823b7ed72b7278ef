"""Records for the sink, numbered; 7 output tokens each, so that sums show what counts might hide."""

import time

from schemas.reasons import FinishReason, Outcome, Tier
from schemas.stats import AttemptFinished, CacheEvent, RequestFinished


def request(number: int, at_unix_ms: int | None = None) -> RequestFinished:
    return RequestFinished(
        request_id=f"r{number}",
        at_unix_ms=at_unix_ms or time.time_ns() // 1_000_000,
        customer=f"c{number % 5}",
        model="acme/support:prod",
        adapter="acme/support@7",
        content_id="abc",
        tier=Tier.GPU,
        outcome=Outcome.OK,
        gateway=1,
        gateway_incarnation=2**40,
        replica=-1,
        attempts=1,
        prompt_tokens=3,
        output_tokens=7,
        ttft_ms=12.5,
        tpot_ms=-1,
        total_ms=99.25,
        detail='a "quote"\n and ü',
    )


def attempt(number: int) -> AttemptFinished:
    return AttemptFinished(
        request_id=f"r{number}",
        attempt=1,
        at_unix_ms=time.time_ns() // 1_000_000,
        customer=f"c{number % 5}",
        adapter="acme/support@7",
        content_id="abc",
        slot=3,
        epoch=9,
        tier=Tier.REMOTE,
        reason=FinishReason.STOP,
        gateway=1,
        gateway_incarnation=5,
        replica=number % 3,
        incarnation=6,
        prompt_tokens=3,
        first_position=0,
        output_tokens=7,
        queue_ms=1.0,
        load_ms=-1.0,
        first_token_ms=2.0,
        total_ms=3.0,
    )


def event(number: int) -> CacheEvent:
    return CacheEvent(
        at_unix_ms=time.time_ns() // 1_000_000,
        replica=number % 3,
        incarnation=6,
        adapter="acme/support@7",
        content_id="abc",
        event="load",
        tier=Tier.GPU,
        source=Tier.RAM,
        bytes=7,
        duration_ms=1.0,
    )
