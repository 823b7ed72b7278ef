"""A tier's book-keeping under any sequence of calls: the budget holds, and nothing in use is evicted."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.loader.shelf import NeverFits, Shelf


def filled(*names: str, budget: int = 30) -> Shelf:
    shelf = Shelf(budget)
    for name in names:
        assert shelf.reserve(name, 10) == {}
        shelf.settle(name)
        shelf.unpin(name)
    return shelf


def test_the_least_recently_used_goes() -> None:
    shelf = filled("a", "b", "c")
    shelf.pin("a")
    shelf.unpin("a")
    assert shelf.names() == ["a", "c", "b"]
    assert shelf.reserve("d", 10) == {"b": 10}
    assert shelf.reserve("e", 20) == {"c": 10, "a": 10}


def test_what_is_pinned_stays() -> None:
    shelf = filled("a", "b", "c")
    shelf.pin("a")
    assert shelf.reserve("d", 20) == {"b": 10, "c": 10}
    assert shelf.reserve("e", 10) is None
    assert shelf.names() == ["a"]
    shelf.unpin("a")
    assert shelf.reserve("e", 10) == {"a": 10}


def test_nothing_goes_for_what_does_not_fit_now() -> None:
    shelf = filled("a", "b", "c")
    shelf.pin("a")
    assert shelf.reserve("d", 30) is None
    assert shelf.names() == ["a", "c", "b"]


def test_what_never_fits_says_so() -> None:
    with pytest.raises(NeverFits, match="31 bytes"):
        filled("a").reserve("d", 31)
    with pytest.raises(NeverFits):
        Shelf(0).reserve("a", 1)


def test_what_is_reserved_is_not_there_yet() -> None:
    shelf = Shelf(30)
    shelf.reserve("a", 10)
    assert not shelf.holds("a")
    assert shelf.names() == []
    assert shelf.used_bytes == 10
    shelf.drop("a")
    assert shelf.used_bytes == 0


class Shelves(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(100)
        self.sizes: dict[str, int] = {}
        self.pins: dict[str, int] = {}
        self.next = 0

    @rule(size=st.integers(0, 60))
    def reserve(self, size: int) -> None:
        name = str(self.next)
        self.next += 1
        going = self.shelf.reserve(name, size)
        if going is None:
            pinned = sum(self.sizes[other] for other in self.sizes if self.pins[other])
            assert pinned + size > 100, "refused although it fits"
            return
        for gone, told in going.items():
            assert self.pins.pop(gone) == 0, "evicted in use"
            assert self.sizes.pop(gone) == told
        self.sizes[name], self.pins[name] = size, 1

    @precondition(lambda self: self.sizes)
    @rule(data=st.data(), times=st.integers(0, 3))
    def pin(self, data: st.DataObject, times: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.sizes)))
        self.shelf.settle(name)
        self.shelf.pin(name, times)
        self.pins[name] += times

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, pins in self.pins.items() if pins)))
        self.shelf.unpin(name)
        self.pins[name] -= 1

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.shelf.used_bytes == sum(self.sizes.values()) <= 100
        assert self.shelf.pinned() == {name: pins for name, pins in self.pins.items() if pins}


TestShelves = Shelves.TestCase
TestShelves.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
