"""Who is served next among customers: virtual token counters. Pure.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each customer has a counter of the service
it got, divided by its weight, and whoever has the least goes first. While two customers always want more, what they got
differs by a bound that does not grow with time.

A customer wants service while it has a sequence that could be read now. One that did not want is lifted to the smallest
counter of those that did, so that nobody saves up. When nobody wanted in the step before, all begin as equals: service
that nobody else wanted costs nothing later, and nothing is remembered for ever.
"""

from collections.abc import Set

INPUT_COST = 1.0  # a prompt token that was computed; one from the prefix cache costs nothing
OUTPUT_COST = 2.0
LEAST_WEIGHT, GREATEST_WEIGHT = 0.001, 1000.0


class Fairness:
    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._wanting: frozenset[str] = frozenset()

    def __len__(self) -> int:
        """Customers that are remembered."""
        return len(self._counters)

    def counter(self, customer: str) -> float:
        """Service so far, in input tokens at weight 1."""
        return self._counters.get(customer, 0.0)

    def want(self, customers: Set[str]) -> None:
        """Says before a step who wants service."""
        stayed = self._wanting & customers
        self._wanting = frozenset(customers)
        if not customers:
            return  # counters stay: whoever has the largest gives way when memory runs out
        if not stayed:
            self._counters = dict.fromkeys(customers, 0.0)
            return
        floor = min(self.counter(customer) for customer in stayed)
        for customer in customers - stayed:
            self._counters[customer] = max(self.counter(customer), floor)
        # One that wants nothing and is not above the floor would be lifted to it anyway.
        self._counters = {c: n for c, n in self._counters.items() if n > floor or c in customers}

    def charge(self, customer: str, weight: float, inputs: int, outputs: int) -> None:
        """The customer got this service."""
        self._counters[customer] = self.counter(customer) + cost(weight, inputs, outputs)


def cost(weight: float, inputs: int, outputs: int = 0) -> float:
    """What so many tokens add to a counter."""
    return (inputs * INPUT_COST + outputs * OUTPUT_COST) / weight
