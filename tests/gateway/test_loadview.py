"""Load = last report + own requests that it does not cover: nothing twice, nothing forgotten, in any order of news."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gateway.loadview import LoadView
from schemas.tokens import LoadReport


def report(read_offset: int, tokens: int) -> LoadReport:
    return LoadReport(read_offset, 1, 0, tokens)


def test_own_requests_count_until_a_report_covers_them() -> None:
    loads = LoadView()
    loads.reported(3, 7, report(10, 500))
    loads.sent(3, 7, ("r", 0), 40)
    assert loads.load(3, 7) == 540
    loads.written(3, 7, ("r", 0), 12)
    loads.reported(3, 7, report(12, 480))
    assert loads.load(3, 7) == 520
    assert not loads.covers(3, 7, 12)
    loads.reported(3, 7, report(13, 515))
    assert loads.load(3, 7) == 515
    assert loads.covers(3, 7, 12)


def test_the_report_may_come_before_the_acknowledgement() -> None:
    loads = LoadView()
    loads.sent(3, 7, ("r", 0), 40)
    loads.reported(3, 7, report(13, 40))
    assert loads.load(3, 7) == 80  # its offset is not known: better twice for a moment than not at all
    loads.written(3, 7, ("r", 0), 12)
    assert loads.load(3, 7) == 40


def test_older_reports_change_nothing() -> None:
    loads = LoadView()
    loads.reported(3, 7, report(13, 40))
    loads.reported(3, 7, report(12, 999))
    assert loads.load(3, 7) == 40
    loads.reported(3, 7, report(13, 30))  # as far, and later: work was done
    assert loads.load(3, 7) == 30


def test_a_new_holder_starts_from_nothing() -> None:
    loads = LoadView()
    loads.reported(3, 7, report(13, 400))
    loads.sent(3, 7, ("r", 0), 40)
    assert not loads.replaced(3, 7)
    loads.reported(3, 9, report(2, 5))
    assert (loads.load(3, 9), loads.load(3, 7)) == (5, 0)
    assert loads.replaced(3, 7)
    assert not loads.replaced(3, 9)
    loads.reported(3, 7, report(99, 9999))
    loads.sent(3, 7, ("r", 1), 40)
    loads.written(3, 7, ("r", 0), 1)
    loads.dropped(3, 7, ("r", 0))
    assert (loads.load(3, 9), loads.load(3, 7)) == (5, 0)
    assert not loads.covers(3, 7, 1)
    assert loads.covers(3, 9, 1)


def test_dropped_counts_no_more() -> None:
    loads = LoadView()
    loads.sent(3, 7, ("r", 0), 40)
    loads.written(3, 7, ("r", 0), 12)
    loads.sent(3, 7, ("r", 1), 50)
    loads.dropped(3, 7, ("r", 0))
    assert loads.load(3, 7) == 50
    loads.dropped(3, 7, ("r", 1))
    loads.dropped(3, 7, ("r", 1))
    loads.dropped(4, 7, ("r", 1))
    loads.written(3, 7, ("r", 1), 13)
    assert loads.load(3, 7) == 0


@dataclass
class _Sent:
    """`offset`: where it lies in the log. The replica has read it if its report says a higher one."""

    key: tuple[str, int]
    cost: int
    offset: int
    acknowledged: bool = False
    dropped: bool = False


@dataclass
class _Replica:
    log: list[_Sent | None] = field(default_factory=list)  # None: another gateway's
    reports: list[LoadReport] = field(default_factory=list)
    newest: LoadReport | None = None


class AnyOrder(RuleBasedStateMachine):
    """A replica that reads its log and reports; acknowledgements and reports reach the view late and out of order."""

    sends: Bundle[_Sent] = Bundle("sends")
    reports: Bundle[LoadReport] = Bundle("reports")

    def __init__(self) -> None:
        super().__init__()
        self.loads = LoadView()
        self.replica = _Replica()
        self.read = 0

    @rule(target=sends, cost=st.integers(1, 100))
    def send(self, cost: int) -> _Sent:
        sent = _Sent(("r", len(self.replica.log)), cost, len(self.replica.log))
        self.replica.log.append(sent)
        self.loads.sent(1, 5, sent.key, cost)
        return sent

    @rule()
    def another_gateway_sends(self) -> None:
        self.replica.log.append(None)

    @rule(sent=sends)
    def acknowledge(self, sent: _Sent) -> None:
        sent.acknowledged = True
        self.loads.written(1, 5, sent.key, sent.offset)

    @rule(sent=consumes(sends))
    def drop(self, sent: _Sent) -> None:
        sent.dropped = True
        self.loads.dropped(1, 5, sent.key)

    @rule(target=reports, records=st.integers(0, 4), tokens=st.integers(0, 1000))
    def read_and_report(self, records: int, tokens: int) -> LoadReport:
        self.read = min(self.read + records, len(self.replica.log))
        return report(self.read, tokens)

    @rule(told=reports)
    def hear(self, told: LoadReport) -> None:
        newest = self.replica.newest
        if newest is None or told.read_offset >= newest.read_offset:
            self.replica.newest = told
        self.loads.reported(1, 5, told)

    @rule(told=reports)
    def hear_a_ghost(self, told: LoadReport) -> None:
        self.loads.reported(1, 4, told)

    @invariant()
    def nothing_twice_nothing_forgotten(self) -> None:
        newest = self.replica.newest
        read = newest.read_offset if newest is not None else 0
        expected = newest.tokens_in_flight if newest is not None else 0
        for sent in self.replica.log:
            # What no acknowledgement has placed yet may be counted twice until then; all else exactly once.
            if sent is not None and not sent.dropped and (not sent.acknowledged or sent.offset >= read):
                expected += sent.cost
        assert self.loads.load(1, 5) == expected


TestAnyOrder: Any = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
