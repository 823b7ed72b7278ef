"""A flip between its beginning and its end: what comes in between, what comes twice, and what it waits for."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.adapters import (
    AdapterCommand,
    ConcludeFlip,
    EndTrial,
    PendingFlip,
    RetireAdapter,
    RollbackAlias,
    SetAlias,
)
from schemas.reasons import AdapterStatus
from schemas.replicas import Answer, Answered
from streams.control.warmup import Conclude, Load, old_versions, step
from streams.placement.rendezvous import ranked
from tests.streams.control.test_registry import ONE, PROD, TWO, Log, register

THREE = "acme/support@3"


class Flips(Log):
    """Three registered versions, PROD at the first. Commands are told one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[AdapterCommand] = []
        for command in (register(ONE), register(TWO, "c" * 64), register(THREE, "e" * 64), SetAlias("c0", PROD, ONE)):
            self.tell(command)

    def tell(self, command: AdapterCommand) -> tuple[int, str, str]:
        """The status, where PROD points now, and what it waits for."""
        self.told.append(command)
        decision = self.deliver(command, len(self.told) - 1)
        self.replaced = decision.replaced
        self.result = decision.result
        row = self.aliases.get(PROD)
        if row is None:
            return decision.result.status, "", ""
        return decision.result.status, row.adapter_id, row.pending.adapter_id if row.pending is not None else ""

    @property
    def flip(self) -> PendingFlip:
        flip = self.aliases[PROD].pending
        assert flip is not None
        return flip

    def conclude(self, warm: bool = True, why: str = "", flip: PendingFlip | None = None) -> tuple[int, str, str]:
        return self.tell(ConcludeFlip(f"f{len(self.told)}", PROD, flip or self.flip, warm, why))


def test_it_moves_when_it_is_warm() -> None:
    log = Flips()
    assert log.tell(SetAlias("c1", PROD, TWO)) == (202, ONE, TWO)
    assert log.flip.deadline_unix_ms == 1_004 + 30_000
    flip = log.flip
    assert log.conclude() == (200, TWO, "")
    assert (log.result.command_id, log.result.previous_adapter_id) == ("c1", ONE)
    records = log.records
    assert log.conclude(flip=flip) == (200, TWO, "")
    assert log.records == records


def test_it_stays_when_it_is_not_and_may_be_tried_again() -> None:
    log = Flips()
    log.tell(SetAlias("c1", PROD, TWO))
    assert log.conclude(False, "too slow") == (504, ONE, "")
    assert "acme/support:prod stays at acme/support@1: too slow" in log.result.refusals[0].message
    assert log.tell(SetAlias("c1", PROD, TWO)) == (202, ONE, TWO)
    assert log.conclude() == (200, TWO, "")


def test_a_later_command_takes_its_place() -> None:
    log = Flips()
    log.tell(SetAlias("c1", PROD, TWO))
    first = log.flip
    assert log.tell(SetAlias("c2", PROD, THREE)) == (202, ONE, THREE)
    assert log.replaced is not None
    assert (log.replaced.command_id, log.replaced.status) == ("c1", 409)
    assert log.conclude(flip=first) == (200, ONE, THREE)  # too late: nothing moves
    assert log.tell(SetAlias("c1", PROD, TWO))[0] == 409  # nor when it is sent again
    assert log.conclude() == (200, THREE, "")


def test_the_same_command_again_waits_on() -> None:
    log = Flips()
    log.tell(SetAlias("c1", PROD, TWO))
    flip = log.flip
    assert log.tell(SetAlias("c1", PROD, TWO)) == (202, ONE, TWO)
    assert log.flip == flip
    assert log.replaced is None


@pytest.mark.parametrize("off", [RollbackAlias("c2", PROD), SetAlias("c2", PROD, ONE)], ids=["rollback", "set"])
def test_it_can_be_called_off(off: AdapterCommand) -> None:
    log = Flips()
    log.tell(SetAlias("c1", PROD, TWO))
    assert log.tell(off) == (200, ONE, "")
    assert log.replaced is not None
    assert log.replaced.command_id == "c1"


def test_a_rollback_ends_at_the_same_adapter_on_either_side_of_the_flip() -> None:
    before, behind = Flips(), Flips()
    for log in (before, behind):
        log.tell(SetAlias("c1", PROD, TWO))
    before.tell(RollbackAlias("c2", PROD))
    behind.conclude()
    behind.tell(RollbackAlias("c2", PROD))
    behind.conclude()
    assert before.aliases[PROD].adapter_id == behind.aliases[PROD].adapter_id == ONE


def test_its_adapter_is_kept_and_must_be_ready_at_its_end() -> None:
    log = Flips()
    log.tell(SetAlias("c1", PROD, TWO))
    assert log.tell(RetireAdapter("c2", TWO))[0] == 409
    assert PROD in log.result.refusals[0].message
    log.adapters[TWO] = msgspec.structs.replace(log.adapters[TWO], status=AdapterStatus.QUARANTINED)
    assert log.conclude() == (504, ONE, "")
    assert "acme/support@2 is quarantined" in log.result.refusals[0].message


class Concludes(msgspec.Struct, frozen=True):
    """Of whatever PROD waits for when it is told; `stale`: of the flip before that."""

    warm: bool
    stale: bool


class Ends(msgspec.Struct, frozen=True):
    """Of the trial that PROD has when it is told."""


MOVES = st.one_of(
    st.builds(
        SetAlias,
        st.just("c"),
        st.just(PROD),
        st.sampled_from([ONE, TWO, THREE]),
        share=st.sampled_from([0.1, 0.5, 1.0]),
    ),
    st.just(Ends()),
    st.just(RollbackAlias("c", PROD)),
    st.builds(RetireAdapter, st.just("c"), st.sampled_from([ONE, TWO, THREE])),
    st.builds(Concludes, st.booleans(), st.booleans()),
)


@given(st.lists(MOVES, max_size=25), st.data())
@settings(max_examples=300)
def test_any_interleaving_however_often_it_is_delivered(moves: list[object], data: st.DataObject) -> None:
    log, flips = Flips(), list[PendingFlip]()
    for number, move in enumerate(moves):
        if isinstance(move, Concludes):
            if len(flips) <= move.stale:
                continue
            log.conclude(move.warm, "", flips[-1 - move.stale])
        elif isinstance(move, Ends):
            if (trial := log.aliases[PROD].trial) is None:
                continue
            log.tell(EndTrial(f"e{number}", PROD, trial, "it fails"))
        else:
            assert isinstance(move, SetAlias | RollbackAlias | RetireAdapter)
            log.tell(msgspec.structs.replace(move, command_id=f"c{number}"))
        row = log.aliases[PROD]
        if row.pending is not None and row.pending not in flips:
            flips.append(row.pending)
        assert all(log.adapters[end].status is AdapterStatus.READY for end in row.ends)
        assert row.trial is None or row.trial.adapter_id != row.adapter_id
        # A crash sends the reader back: nothing is written anew, and the newest command gets its answer again.
        before, back = log.snapshot(), data.draw(st.integers(0, len(log.told) - 1))
        for offset in range(back, len(log.told)):
            again = log.deliver(log.told[offset], offset)
            assert again.record is None
        assert log.snapshot() == before
        if (row.command_partition, row.command_offset) == (3, len(log.told) - 1):
            assert again.result == log.result


READY = Flips().adapters[TWO]
FLIP = PendingFlip(TWO, "alias", "c1", "topic", 5_000, 3, 4)
OWNERS = ranked(TWO, range(4))


@pytest.mark.parametrize(
    ("slots", "now", "next_step"),
    [
        (None, 0, Load([])),
        ({}, 0, Conclude(True, "no replica takes work: there was nothing to warm")),
        ({n: [] for n in range(4)}, 0, Load(OWNERS[:2])),
        ({n: [TWO] if n == OWNERS[0] else [] for n in range(4)}, 0, Load([OWNERS[1]])),
        ({n: [TWO] if n in OWNERS[:2] else [] for n in range(4)}, 0, Conclude(True)),
        ({n: [TWO] if n in OWNERS[2:] else [] for n in range(4)}, 0, Load(OWNERS[:2])),
        ({n: [TWO] for n in OWNERS[2:]}, 0, Conclude(True)),  # both owners are gone: the next ones own it
        ({7: [ONE]}, 5_000, Conclude(False, "replicas [7] have not loaded acme/support@2 in time")),
        (None, 5_000, Conclude(False, "no replica was heard that could load acme/support@2 in time")),
        ({7: [TWO]}, 9_000, Conclude(True)),
    ],
)
def test_what_a_flip_needs_next(slots: dict[int, list[str]] | None, now: int, next_step: object) -> None:
    assert step(FLIP, READY, slots, now) == next_step


def test_a_rollback_moves_cold_when_its_time_is_up() -> None:
    back = msgspec.structs.replace(FLIP, command="rollback")
    assert step(back, READY, {7: []}, 0) == Load([7])
    assert step(back, READY, {7: []}, 5_000) == Conclude(True, "replicas [7] have not loaded acme/support@2 in time")


def test_what_can_never_be_loaded_is_not_waited_for() -> None:
    torn, away = Answer("c", Answered.FAILED, "torn", lasting=True), Answer("c", Answered.FAILED, "the store is away")
    said = Conclude(False, "replica 7 cannot load acme/support@2: torn")
    assert step(FLIP, READY, {7: []}, 0, failures={7: torn}) == said
    assert step(msgspec.structs.replace(FLIP, command="rollback"), READY, {7: []}, 0, failures={7: torn}) == said
    assert step(FLIP, READY, {7: [TWO]}, 0, failures={7: torn}) == Conclude(True)  # it came after all
    assert step(FLIP, READY, {8: []}, 0, failures={7: torn}) == Load([8])  # no owner any more
    assert step(FLIP, READY, {7: []}, 0, failures={7: away}) == Load([7])
    late = "replicas [7] have not loaded acme/support@2 in time; 7: the store is away"
    assert step(FLIP, READY, {7: []}, 5_000, failures={7: away}) == Conclude(False, late)


def test_a_version_that_is_no_longer_ready_is_not_waited_for() -> None:
    retired = msgspec.structs.replace(READY, status=AdapterStatus.RETIRED)
    assert step(FLIP, retired, {7: [TWO]}, 0) == Conclude(False, "acme/support@2 is retired")
    assert step(FLIP, None, None, 0) == Conclude(False, "acme/support@2 is not registered")


def test_old_versions_leave_their_slots_unless_the_bytes_are_in_use() -> None:
    slots = {0: [ONE, TWO], 1: [TWO]}
    assert old_versions(ONE, slots, {ONE: "a", TWO: "b"}, {TWO}) == [0]
    assert old_versions(ONE, slots, {ONE: "a", TWO: "a"}, {TWO}) == []
