"""The compacted table `customers`. Key: customer id. Keys are kept as sha256 alone: a key is shown once, when made."""

import msgspec

from schemas.reasons import Role


class ApiKey(msgspec.Struct, frozen=True):
    """sha256 of the whole key in hex; `hint` is its first characters, for people."""

    sha256: str
    hint: str
    role: Role


class Customer(msgspec.Struct, frozen=True, omit_defaults=True):
    """`max_in_flight` bounds a customer's open outputs on one gateway; `weight` is its share under contention.

    Per minute, over all gateways: requests, and tokens of prompts and outputs. Of one request: tokens of its prompt,
    and of each output. 0: no such limit.
    """

    customer: str
    keys: list[ApiKey]
    max_in_flight: int = 256
    weight: float = 1.0
    updated_unix_ms: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_input_tokens: int = 0
    max_output_tokens: int = 0
