"""A share of an alias' conversations: begun, enlarged, made the whole, called off, and ended by its own failures."""

import msgspec
import pytest

from schemas.adapters import AdapterCommand, AliasRecord, EndTrial, RetireAdapter, RollbackAlias, SetAlias, Trial
from schemas.reasons import AdapterStatus, Outcome
from schemas.stats import RequestFinished
from schemas.topics import ALIASES
from streams.bus.table import Change
from streams.control.trials import LAST, Trials, verdict
from tests.streams.control.test_flips import THREE, Flips
from tests.streams.control.test_registry import ONE, PROD, TWO
from tests.streams.sink.samples import request


class Tried(Flips):
    """PROD at version 1, and version 2 on trial for a tenth."""

    def __init__(self) -> None:
        super().__init__()
        assert self.tell(SetAlias("c1", PROD, TWO, share=0.1)) == (202, ONE, TWO)
        assert self.conclude() == (200, ONE, "")

    @property
    def row(self) -> AliasRecord:
        return self.aliases[PROD]

    @property
    def trial(self) -> Trial:
        assert self.row.trial is not None
        return self.row.trial


def has_trial(log: Tried) -> bool:
    return log.row.trial is not None


def test_it_is_warmed_up_and_stands_beside() -> None:
    log = Tried()
    assert (log.trial.adapter_id, log.trial.share, log.trial.command_id) == (TWO, 0.1, "c1")
    assert (log.result.adapter_id, log.result.trial_adapter_id, log.result.trial_share) == (ONE, TWO, 0.1)
    assert log.row.previous_adapter_id == ""
    assert log.tell(RetireAdapter("c2", TWO))[0] == 409


def test_another_share_at_once_and_then_the_whole() -> None:
    log = Tried()
    since = log.trial.since_unix_ms
    assert log.tell(SetAlias("c2", PROD, TWO, share=0.5)) == (200, ONE, "")
    assert (log.trial.share, log.trial.since_unix_ms) == (0.5, since)
    assert log.tell(SetAlias("c3", PROD, TWO, share=0.5)) == (200, ONE, "")
    assert log.trial.command_id == "c2"  # it was so already
    assert log.tell(SetAlias("c4", PROD, TWO)) == (202, ONE, TWO)
    assert has_trial(log)  # until it moves
    assert log.conclude() == (200, TWO, "")
    assert not has_trial(log)
    assert log.row.previous_adapter_id == ONE


@pytest.mark.parametrize("off", [RollbackAlias("c2", PROD), SetAlias("c2", PROD, ONE)], ids=["rollback", "set"])
def test_it_can_be_called_off(off: AdapterCommand) -> None:
    log = Tried()
    assert log.tell(off) == (200, ONE, "")
    assert log.result.trial_adapter_id == ""
    assert not has_trial(log)
    assert log.tell(RetireAdapter("c3", TWO))[0] == 200


def test_another_version_takes_its_place_only_when_that_is_warm() -> None:
    log = Tried()
    log.tell(SetAlias("c2", PROD, THREE, share=0.2))
    assert log.conclude(False, "too slow") == (504, ONE, "")
    assert log.trial.adapter_id == TWO
    log.tell(SetAlias("c2", PROD, THREE, share=0.2))
    log.conclude()
    assert (log.trial.adapter_id, log.row.adapter_id) == (THREE, ONE)
    log.tell(SetAlias("c5", PROD, TWO))
    assert log.conclude() == (200, TWO, "")
    assert not has_trial(log)


def test_its_end_is_decided_once_and_only_for_itself() -> None:
    log = Tried()
    trial = log.trial
    log.tell(SetAlias("c2", PROD, TWO, share=0.5))
    assert log.tell(EndTrial("e1", PROD, trial, "too old")) == (200, ONE, "")
    assert has_trial(log)
    log.tell(SetAlias("c3", PROD, TWO))  # about to be the whole
    assert log.tell(EndTrial("e2", PROD, log.trial, "it fails")) == (200, ONE, "")
    assert not has_trial(log)
    assert log.replaced is not None
    assert (log.replaced.command_id, log.replaced.status) == ("c3", 409)
    assert "failed on trial: it fails" in log.replaced.refusals[0].message
    records = log.records
    assert log.tell(EndTrial("e3", PROD, trial, "again")) == (200, ONE, "")
    assert log.records == records


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("inf"), float("nan")])
def test_what_is_no_share(share: float) -> None:
    log = Flips()
    assert log.tell(SetAlias("c1", PROD, TWO, share=share)) == (422, ONE, "")
    assert log.result.refusals[0].field == "share"


def test_a_share_needs_something_that_serves_the_rest() -> None:
    log = Flips()
    assert log.tell(SetAlias("c1", "acme/new:prod", TWO, share=0.5))[0] == 409
    assert "acme/new:prod" not in log.aliases
    assert log.tell(SetAlias("c2", PROD, ONE, share=0.5)) == (409, ONE, "")
    assert log.result.refusals[0].field == "share"


def outcomes(bad: int, good: int) -> list[bool]:
    return [True] * bad + [False] * good


@pytest.mark.parametrize(
    ("tried", "beside", "fails"),
    [
        (outcomes(2, 0), [], False),  # too few to tell
        (outcomes(3, 0), [], True),
        (outcomes(3, 12), outcomes(0, 50), True),
        (outcomes(3, 13), outcomes(0, 50), False),
        (outcomes(10, 10), outcomes(13, 37), False),  # nearly as many fail beside it
        (outcomes(10, 10), outcomes(12, 38), True),
        (outcomes(20, 0), outcomes(20, 0), False),
    ],
)
def test_what_fails(tried: list[bool], beside: list[bool], fails: bool) -> None:
    assert bool(verdict({TWO: tried, ONE: beside}, TWO, ONE)) is fails


def ended(adapter: str, outcome: Outcome, model: str = PROD) -> RequestFinished:
    return msgspec.structs.replace(request(1), model=model, adapter=adapter, outcome=outcome)


def test_outcomes_count_from_its_beginning_and_only_its_alias() -> None:
    log, trials = Tried(), Trials()

    def note(row: AliasRecord | None) -> None:
        trials.note_alias(Change(ALIASES, PROD, row, None, 0, 0, 0, True))

    for _ in range(5):
        trials.note(ended(TWO, Outcome.FAILED))
    note(log.row)
    for _ in range(5):
        trials.note(ended(TWO, Outcome.FAILED, "acme/other:prod"))
        trials.note(ended(TWO, Outcome.CANCELLED))
        trials.note(ended(TWO, Outcome.OVERLOADED))
        trials.note(ended(THREE, Outcome.FAILED))
    assert list(trials.failed(log.adapters)) == []
    for _ in range(2 * LAST):
        trials.note(ended(ONE, Outcome.OK))
    for _ in range(3):
        trials.note(ended(TWO, Outcome.FAILED))
    ((row, trial, why),) = trials.failed(log.adapters)
    assert (row, trial) == (log.row, log.trial)
    assert why == "3 of its last 3 requests failed, and 0 of the last 50 of acme/support@1"
    note(msgspec.structs.replace(log.row, trial=msgspec.structs.replace(log.trial, share=0.9)))
    assert len(list(trials.failed(log.adapters))) == 1  # another share is the same trial
    note(msgspec.structs.replace(log.row, trial=None))
    assert list(trials.failed(log.adapters)) == []


def test_a_version_that_is_not_ready_any_more_has_failed() -> None:
    log, trials = Tried(), Trials()
    trials.note_alias(Change(ALIASES, PROD, log.row, None, 0, 0, 0, True))
    log.adapters[TWO] = msgspec.structs.replace(log.adapters[TWO], status=AdapterStatus.QUARANTINED)
    assert [why for _, _, why in trials.failed(log.adapters)] == ["acme/support@2 is quarantined"]
