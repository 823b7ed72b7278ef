"""What follows from a round's answers. Pure.

Wrong is only what was wrong twice. A replica is at fault where another one answers rightly what it does not: it is
taken out. An adapter is at fault where it alone is right nowhere: it is quarantined. With one replica these two cannot
be told apart, and the adapter is what is taken away. A probe must not be able to stop a fleet: a replica is left in,
and an operator told, unless another one is left that got all of that right and nothing wrong; and where several
adapters are right nowhere the fault is the fleet's, or the probe's own.
Where somebody who could have settled it could not be asked, nothing is done, and the next round comes at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Result(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    UNASKED = "unasked"


Seen = Mapping[tuple[int, str], Result]  # (replica, adapter id) -> what came of it


@dataclass(frozen=True)
class Verdict:
    """`told`: what an operator must decide, for the probe does not. `again`: at once, for it was not settled."""

    drain: tuple[int, ...] = ()
    quarantine: tuple[str, ...] = ()
    told: str = ""
    again: bool = False


def judge(seen: Seen) -> Verdict:
    """Of one round, in which every live replica was asked for every canary."""
    wrong = [pair for pair, result in seen.items() if result is Result.WRONG]
    if not wrong:
        return Verdict()
    by_adapter = {adapter: _of(seen, adapter) for _, adapter in wrong}
    nowhere = sorted(adapter for adapter, results in by_adapter.items() if Result.RIGHT not in results)
    if any(Result.UNASKED in by_adapter[adapter] for adapter in nowhere):
        return Verdict(told=f"{_names(nowhere)}: right nowhere, but some replicas could not be asked", again=True)
    if len(nowhere) > 1:
        return Verdict(told=f"{_names(nowhere)} are right on no replica: the fleet's fault, or the probe's")
    faulty = sorted({replica for replica, adapter in wrong if adapter not in nowhere})
    asked = {adapter for _, adapter in wrong if adapter not in nowhere}
    if faulty and not any(all(seen[replica, a] is Result.RIGHT for a in asked) for replica, _ in seen):
        return Verdict(told=f"replicas {faulty} answer wrongly, and none is left that answers rightly")
    return Verdict(tuple(faulty), tuple(nowhere))


def _of(seen: Seen, adapter: str) -> set[Result]:
    return {result for (_, name), result in seen.items() if name == adapter}


def _names(adapters: list[str]) -> str:
    return ", ".join(adapters)
