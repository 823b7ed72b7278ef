"""API keys: the header -> who asks, and what they may do. Pure.

Owns the index of the `customers` table by key hash, and looks at the clock for keys that end. Keys are kept as sha256
alone. Ordering relied on: the table's, per customer: a key that a newer record leaves out stops working with it.
"""

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from gateway.errors import ApiError
from schemas.customers import ApiKey, Customer
from schemas.reasons import Role

SCHEME = "bearer "


@dataclass(frozen=True)
class Identity:
    """The key and whose it is."""

    customer: Customer
    key: ApiKey

    @property
    def role(self) -> Role:
        return self.key.role

    @property
    def principal(self) -> str:
        """As it stands in events. A hint is enough to tell keys apart, not to use one."""
        return f"{self.customer.customer} {self.key.role} {self.key.hint}"


class Keys:
    """Every valid key of every customer. `now`: unix seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._by_hash: dict[str, tuple[ApiKey, Customer]] = {}
        self._customers: dict[str, Customer] = {}

    def apply(self, name: str, customer: Customer | None) -> None:
        """A record of the table; None: the customer is gone."""
        previous = self._customers.pop(name, None)
        for key in previous.keys if previous is not None else []:
            if (held := self._by_hash.get(key.sha256)) is not None and held[1] is previous:
                del self._by_hash[key.sha256]
        if customer is not None:
            self._customers[name] = customer
            for key in customer.keys:
                self._by_hash[key.sha256] = (key, customer)

    def customer(self, name: str) -> Customer | None:
        return self._customers.get(name)

    def customers(self) -> list[Customer]:
        """All, by name."""
        return [self._customers[name] for name in sorted(self._customers)]

    def identify(self, authorization: str | None) -> Identity:
        """Who the Authorization header speaks for. Raises ApiError (401)."""
        if not authorization:
            raise ApiError("unauthorized", "no API key: send it as Authorization: Bearer KEY")
        if not authorization[: len(SCHEME)].lower() == SCHEME:
            raise ApiError("unauthorized", "Authorization is not of the form Bearer KEY")
        digest = sha256(authorization[len(SCHEME) :].strip().encode(errors="surrogateescape")).hexdigest()
        found = self._by_hash.get(digest)
        # What is looked up is a hash of a random secret, so the look-up's time tells nothing of the secret.
        if found is None or not hmac.compare_digest(found[0].sha256, digest):
            raise ApiError("unauthorized", "the API key is not valid")
        key, customer = found
        if key.expires_unix_ms and self._now() * 1000 >= key.expires_unix_ms:
            raise ApiError("unauthorized", f"the API key {key.hint}... has expired")
        return Identity(customer, key)

    def allow(self, authorization: str | None, *roles: Role) -> Identity:
        """`identify`, for those with one of `roles`. Raises ApiError (401, 403)."""
        identity = self.identify(authorization)
        if identity.role not in roles:
            wanted = " or ".join(roles)
            raise ApiError("forbidden", f"this key has the role {identity.role}: this needs {wanted}")
        return identity
