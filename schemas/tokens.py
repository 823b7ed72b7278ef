"""What a worker writes to a gateway's partition of `tokens`: one TokenBatch per engine step and gateway.

Tokens are identified by (request, attempt, output position); positions are absolute, so that a reader can trim what it
has and see what it misses. The events are arrays on the wire: fields may only be appended to them.
"""

import msgspec

from schemas.reasons import FinishReason, RejectReason, Tier


class Admitted(msgspec.Struct, frozen=True, tag="a", array_like=True):
    """The worker holds this attempt. Sent once, before its first token."""

    request_id: str
    attempt: int
    tier: Tier


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms. `own`: the token's; `likeliest`: (id, its) from the likeliest down."""

    own: float
    likeliest: list[tuple[int, float]]


class Tokens(msgspec.Struct, frozen=True, tag="t", array_like=True):
    """`ids` stand at output positions position, position + 1, ...; `scores`: one of each, if the request asks for them.

    `cached` of the prompt's tokens were found in the prefix cache; said with the attempt's first tokens.
    """

    request_id: str
    attempt: int
    position: int
    ids: list[int]
    scores: list[Logprobs] = []
    cached: int = 0


class Finished(msgspec.Struct, frozen=True, tag="f", array_like=True):
    """No more tokens of this attempt follow. `length` is the output's whole length, earlier attempts included."""

    request_id: str
    attempt: int
    length: int
    reason: FinishReason
    detail: str = ""


class Rejected(msgspec.Struct, frozen=True, tag="r", array_like=True):
    """The attempt was not taken; nothing of it ran."""

    request_id: str
    attempt: int
    reason: RejectReason
    detail: str = ""


TokenEvent = Admitted | Tokens | Finished | Rejected


class LoadReport(msgspec.Struct, frozen=True):
    """A replica's load when it had read `requests` up to, not including, `read_offset`.

    tokens_in_flight: tokens still to be computed for everything admitted (prompt not yet read + output still allowed).
    """

    read_offset: int
    running: int
    waiting: int
    tokens_in_flight: int


class TokenBatch(msgspec.Struct, frozen=True):
    """One step's events for one gateway incarnation, in order."""

    replica: int
    incarnation: int
    gateway: int
    gateway_incarnation: int
    load: LoadReport
    events: list[TokenEvent]
