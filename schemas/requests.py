"""What a gateway writes to a replica's partition of `requests`."""

import msgspec


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn. The noise is a function of (seed, output position) alone.

    temperature 0 is greedy. Drawn from are the `top_k` likeliest ids (0: all), of these the nucleus whose mass reaches
    `top_p` in (0, 1] of theirs, of these the ones at least `min_p` times as likely as the likeliest. Penalties and
    `logit_bias`, id -> what is added, come first. `top_logprobs`: how many alternatives to report with each token's
    own log-probability; None reports nothing. After penalties and biases and before
    all else, ids after which the output could not become a text that fits `json_schema`, a JSON schema's text, are left
    out; empty: none are.
    """

    seed: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    top_logprobs: int | None = None
    json_schema: str = ""


class Submit(msgspec.Struct, frozen=True, tag="submit", omit_defaults=True):
    """One attempt of one request, for one incarnation of one replica.

    `adapter` and `content_id` are empty for the base model. `generated` are the output tokens that earlier attempts
    produced: the attempt goes on at output position len(generated). `max_tokens` counts the whole output, those
    included. `remaining_ms` counts from the record's arrival at the worker.
    """

    request_id: str
    attempt: int
    customer: str
    adapter: str
    content_id: str
    base_hash: str
    replica: int
    incarnation: int
    gateway: int
    gateway_incarnation: int
    prompt: list[int]
    generated: list[int]
    max_tokens: int
    sampling: Sampling
    stop_ids: list[int]
    remaining_ms: int


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Ends every attempt of the request up to and including `attempt`, in any state. Unknown ids are remembered."""

    request_id: str
    attempt: int
    gateway: int
    gateway_incarnation: int


Request = Submit | Cancel
