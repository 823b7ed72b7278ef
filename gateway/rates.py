"""Requests and tokens per minute of each customer, over all gateways. Pure; `now` is monotonic seconds.

A bucket holds a minute's worth and fills evenly (a token bucket, RFC 2697's single rate without its excess burst). A
request is paid for when it is accepted, with all the tokens it may need, and what it did not use comes back at its end.
What other gateways took is taken here too as soon as it is heard, and may leave a debt. So the limit holds over all
gateways up to what each accepts between one telling and the next (gateway/usage.py): a customer who fills several
gateways in the same moment gets at most its burst, one minute's worth, once at each of them, and owes the rest.
A crash forgets what was taken: a restarted gateway begins with full buckets.
"""

import math
from collections import Counter
from dataclasses import dataclass

from gateway.errors import ApiError
from schemas.customers import Customer

MINUTE_S = 60.0
FORGET_S = 2 * MINUTE_S  # a bucket that nobody touched for so long is full again


@dataclass
class Bucket:
    """`level` of `limit` as of `at`; below 0 it is a debt."""

    limit: int
    level: float
    at: float

    def fill(self, limit: int, now: float) -> None:
        """Up to now, at a limit that may have changed since."""
        self.level = min(float(limit), self.level + max(0.0, now - self.at) * limit / MINUTE_S)
        self.limit, self.at = limit, now

    def wait_s(self, amount: float) -> float:
        """Until so much can be taken."""
        return max(0.0, amount - self.level) * MINUTE_S / self.limit


@dataclass(frozen=True)
class Standing:
    """What a client is told of one limit: the most, what is left, seconds until it is full."""

    limit: int
    remaining: int
    reset_s: float


class Rates:
    """`taken` is what was taken here and not told to the other gateways yet: customer -> (requests, tokens).

    `reserved`: the tokens that open requests have paid for in advance, of customers with limits and without.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def take(self, customer: Customer, tokens: int, now: float) -> "Reservation":
        """Pays for one request and `tokens`, or for nothing. Raises ApiError (429) with the seconds to wait."""
        name = customer.customer
        wanted = (("requests", customer.requests_per_minute, 1), ("tokens", customer.tokens_per_minute, tokens))
        for what, limit, amount in wanted:
            if limit and amount > limit:
                told = f"the request may need {amount} {what}, and {limit} per minute are this customer's: ask for less"
                raise ApiError("too_large_for_rate", told, "max_tokens")
        buckets = [(what, amount, self._bucket(name, what, limit, now)) for what, limit, amount in wanted if limit]
        short = [(bucket.wait_s(amount), what, bucket) for what, amount, bucket in buckets if bucket.level < amount]
        if short:
            seconds, what, bucket = max(short, key=lambda wait: wait[0])
            told = f"{bucket.limit} {what} per minute are this customer's, and {max(0, int(bucket.level))} are left"
            raise ApiError("rate_limited", told, retry_after_s=math.ceil(seconds))
        for _, amount, bucket in buckets:
            bucket.level -= amount
        if buckets:
            self._requests[name] += 1
            self._tokens[name] += tokens
        self.reserved += tokens
        return Reservation(self, customer, tokens)

    def give_back(self, customer: Customer, tokens: int, now: float) -> None:
        """So many tokens were not needed."""
        if limit := customer.tokens_per_minute:
            bucket = self._bucket(customer.customer, "tokens", limit, now)
            bucket.level = min(float(limit), bucket.level + tokens)
        if customer.tokens_per_minute or customer.requests_per_minute:
            self._tokens[customer.customer] -= tokens

    def taken_elsewhere(self, customer: Customer, requests: int, tokens: int, now: float) -> None:
        """What another gateway told; tokens below 0 came back there."""
        told = (("requests", customer.requests_per_minute, requests), ("tokens", customer.tokens_per_minute, tokens))
        for what, limit, amount in told:
            if limit:
                bucket = self._bucket(customer.customer, what, limit, now)
                bucket.level = min(float(limit), bucket.level - amount)

    def taken(self) -> dict[str, tuple[int, int]]:
        """Since it was last asked."""
        names = self._requests.keys() | self._tokens.keys()
        told = {name: (self._requests[name], self._tokens[name]) for name in sorted(names)}
        self._requests, self._tokens = Counter(), Counter()
        return {name: counts for name, counts in told.items() if any(counts)}

    def standing(self, customer: Customer, now: float) -> dict[str, Standing]:
        """Of each limit that the customer has."""
        limits = {"requests": customer.requests_per_minute, "tokens": customer.tokens_per_minute}
        found = {}
        for what, limit in limits.items():
            if limit:
                bucket = self._bucket(customer.customer, what, limit, now)
                found[what] = Standing(limit, max(0, int(bucket.level)), bucket.wait_s(limit))
        return found

    def tidy(self, now: float) -> None:
        """Forgets full buckets: memory is bounded by the customers of the last minutes."""
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if now - bucket.at < FORGET_S}

    def _bucket(self, customer: str, what: str, limit: int, now: float) -> Bucket:
        bucket = self._buckets.get((customer, what))
        if bucket is None:
            bucket = self._buckets[customer, what] = Bucket(limit, float(limit), now)
        bucket.fill(limit, now)
        return bucket


class Reservation:
    """One request's tokens, paid in advance. `settle` once, at its end."""

    def __init__(self, rates: Rates, customer: Customer, tokens: int) -> None:
        self._rates, self._customer, self._tokens = rates, customer, tokens

    def settle(self, used: int, now: float) -> None:
        self._rates.reserved -= self._tokens
        self._rates.give_back(self._customer, self._tokens - used, now)
