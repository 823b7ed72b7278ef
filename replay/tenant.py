"""A customer as the demo and the benchmarks make one: a name and an API key."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tenant:
    customer: str
    key: str
