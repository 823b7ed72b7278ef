"""The compacted table `customers`. Key: customer id. Keys are kept as sha256 alone: a key is shown once, when made."""

import msgspec

from schemas.reasons import Role


class ApiKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """sha256 of the whole key in hex; `hint` is its first characters, for people. Not valid from `expires_unix_ms` on.

    `models`: what a customer's key may name as `model`: aliases, adapters, the base model, or `customer/name`, which
    stands for all its versions and aliases. Empty: everything of its customer's. 0: never; unknown.
    """

    sha256: str
    hint: str
    role: Role
    created_unix_ms: int = 0
    expires_unix_ms: int = 0
    models: tuple[str, ...] = ()

    def allows(self, model: str) -> bool:
        return not self.models or any(
            model == name or model.startswith((f"{name}@", f"{name}:")) for name in self.models
        )


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
