"""Which trials of a version have failed: it is not ready any more, or its requests fail where its neighbour's do not.

Owns the last outcomes of the requests that named an alias with a trial, by the version that answered. Each control
process counts by itself, from its own start on: a crash forgets the counts, and a failing version fails on. Ordering
relied on: none. Pure.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping

from schemas.adapters import AdapterRecord, AliasRecord, Trial
from schemas.reasons import AdapterStatus, Outcome
from schemas.stats import RequestFinished
from streams.bus.table import Change
from streams.control.registry import Rows

LAST = 50  # requests of each version that count
FEWEST_FAILED = 3
WORST_SHARE = 0.2  # of a version's requests may fail
TIMES_WORSE = 2.0  # than the neighbour's: where everything fails it is not the version

# The others say nothing of a version: the client left, the fleet was full, or nobody lived.
JUDGED = (Outcome.OK, Outcome.FAILED)


class Trials:
    def __init__(self) -> None:
        self._rows: dict[str, AliasRecord] = {}
        self._failed: dict[str, dict[str, deque[bool]]] = {}  # alias -> adapter -> whether each of the last failed

    def note_alias(self, change: Change[AliasRecord]) -> None:
        """A record of `aliases`. Outcomes count from the beginning of a trial on."""
        row, before = change.value, self._rows.pop(change.key, None)
        if row is None or row.trial is None:
            self._failed.pop(change.key, None)
            return
        self._rows[row.alias] = row
        if before is None or before.trial is None or before.trial.adapter_id != row.trial.adapter_id:
            beside = (row.adapter_id, row.trial.adapter_id)
            self._failed[row.alias] = {adapter: deque(maxlen=LAST) for adapter in beside}

    def note(self, request: RequestFinished) -> None:
        outcomes = self._failed.get(request.model, {}).get(request.adapter)
        if outcomes is not None and request.outcome in JUDGED:
            outcomes.append(request.outcome is Outcome.FAILED)

    def failed(self, adapters: Rows[AdapterRecord]) -> Iterator[tuple[AliasRecord, Trial, str]]:
        """The aliases whose trial must end, and why."""
        for row in self._rows.values():
            trial = row.trial
            assert trial is not None
            adapter = adapters.get(trial.adapter_id)
            if adapter is None or adapter.status is not AdapterStatus.READY:
                status = adapter.status if adapter is not None else "not registered"
                yield row, trial, f"{trial.adapter_id} is {status}"
            elif why := verdict(self._failed[row.alias], trial.adapter_id, row.adapter_id):
                yield row, trial, why


def verdict(failed: Mapping[str, Collection[bool]], tried: str, beside: str) -> str:
    """Why the version `tried` has failed beside the other; empty if it has not."""
    outcomes, others = failed[tried], failed.get(beside, ())
    bad, share = sum(outcomes), sum(outcomes) / max(1, len(outcomes))
    neighbour = sum(others) / max(1, len(others))
    if bad < FEWEST_FAILED or share < WORST_SHARE or share <= TIMES_WORSE * neighbour:
        return ""
    return f"{bad} of its last {len(outcomes)} requests failed, and {sum(others)} of the last {len(others)} of {beside}"
