import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.engine.slots import Lease, SlotInUse, Slots

CONTENTS = [f"c{i}" for i in range(6)]


class SlotRules(RuleBasedStateMachine):
    """Random loads, leases and releases against a plain model of what must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(3)
        self.leases: dict[int, Lease] = {}
        self.seq = 0
        self.last_epoch = dict.fromkeys(range(1, 4), 0)

    @rule(content=st.sampled_from(CONTENTS), spared=st.sets(st.sampled_from(CONTENTS)))
    def place(self, content: str, spared: set[str]) -> None:
        if self.slots.holds(content):
            with pytest.raises(ValueError):
                self.slots.place(content, spared.__contains__)
            return
        before = self.slots.contents()
        placed = self.slots.place(content, spared.__contains__)
        leased = {lease.content_id for lease in self.leases.values()}
        idle = [c for c in before if c not in leased and c not in spared]
        assert (placed is None) == (len(before) == 3 and not idle)
        if placed is None:
            return
        assert placed.evicted in ["", *idle]
        assert (placed.evicted == "") == (len(before) < 3)
        assert placed.epoch > self.last_epoch[placed.slot]
        self.last_epoch[placed.slot] = placed.epoch

    @rule(content=st.sampled_from(CONTENTS))
    def lease(self, content: str) -> None:
        self.seq += 1
        if not self.slots.holds(content):
            with pytest.raises(KeyError):
                self.slots.lease(self.seq, content)
            return
        self.leases[self.seq] = self.slots.lease(self.seq, content)
        with pytest.raises(KeyError):
            self.slots.lease(self.seq, content)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.leases)))
        del self.leases[seq]
        self.slots.release(seq)
        self.slots.release(seq)

    @rule(content=st.sampled_from(CONTENTS))
    def vacate(self, content: str) -> None:
        if content in {lease.content_id for lease in self.leases.values()}:
            with pytest.raises(SlotInUse):
                self.slots.vacate(content)
        else:
            resident = self.slots.contents().get(content, (0, 0))
            assert self.slots.vacate(content) == resident[0]
            assert not self.slots.holds(content)

    @invariant()
    def each_slot_holds_one_content_and_leases_keep_theirs(self) -> None:
        contents = self.slots.contents()
        slots = [slot for slot, _ in contents.values()]
        assert len(slots) == len(set(slots)) <= 3
        assert set(slots) <= {1, 2, 3}
        for lease in self.leases.values():
            assert contents[lease.content_id] == (lease.slot, lease.epoch)
        assert self.slots.leased == len(self.leases)

    def teardown(self) -> None:
        for seq in self.leases:
            self.slots.release(seq)
        assert self.slots.leased == 0


TestSlots = SlotRules.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_least_recently_used_idle_content_goes_first() -> None:
    slots = Slots(3)
    for content in "abc":
        slots.place(content, "".__contains__)
    slots.lease(1, "a")
    slots.release(1)
    slots.lease(2, "b")
    assert [slots.place(content, "".__contains__).evicted for content in "de"] == ["c", "a"]  # type: ignore[union-attr]
    assert slots.place("f", "de".__contains__) is None


def test_a_content_has_its_place_in_one_pool_alone() -> None:
    slots = Slots(1, 2)
    small, large = slots.place("a", "".__contains__, 0), slots.place("b", "".__contains__, 1)
    assert small is not None
    assert large is not None
    assert (small.slot, large.slot) == (1, 2)
    slots.lease(1, "a")
    assert slots.place("c", "".__contains__, 0) is None
    other = slots.place("d", "".__contains__, 1)
    assert other is not None
    assert other.slot == 3
    third = slots.place("e", "".__contains__, 1)
    assert third is not None
    assert (third.slot, third.evicted) == (2, "b")
