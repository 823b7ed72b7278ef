"""A tier's book-keeping under any sequence of calls: the budget holds, and nothing in use is evicted."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.loader.shelf import NeverFits, Shelf


def filled(*names: str, budget: int = 30) -> Shelf:
    shelf = Shelf(budget)
    for name in names:
        assert shelf.reserve(name, 10, "h") == {}
        shelf.settle(name)
        shelf.release(name, "h")
    return shelf


def test_the_least_recently_used_goes() -> None:
    shelf = filled("a", "b", "c")
    shelf.lease("a", "h")
    shelf.release("a", "h")
    assert shelf.names() == ["a", "c", "b"]
    assert shelf.reserve("d", 10, "h") == {"b": 10}
    assert shelf.reserve("e", 20, "h") == {"c": 10, "a": 10}


def test_what_is_pinned_stays() -> None:
    shelf = filled("a", "b", "c")
    shelf.lease("a", "h")
    assert shelf.reserve("d", 20, "h") == {"b": 10, "c": 10}
    assert shelf.reserve("e", 10, "h") is None
    assert shelf.names() == ["a"]
    shelf.release("a", "h")
    assert shelf.reserve("e", 10, "h") == {"a": 10}


def test_nothing_goes_for_what_does_not_fit_now() -> None:
    shelf = filled("a", "b", "c")
    shelf.lease("a", "h")
    assert shelf.reserve("d", 30, "h") is None
    assert shelf.names() == ["a", "c", "b"]


def test_what_never_fits_says_so() -> None:
    with pytest.raises(NeverFits, match="31 bytes"):
        filled("a").reserve("d", 31, "h")
    with pytest.raises(NeverFits):
        Shelf(0).reserve("a", 1, "h")


def test_what_is_reserved_is_not_there_yet() -> None:
    shelf = Shelf(30)
    shelf.reserve("a", 10, "h")
    assert not shelf.holds("a")
    assert shelf.names() == []
    assert shelf.used_bytes == 10
    shelf.drop("a")
    assert shelf.used_bytes == 0


def test_what_nobody_asked_for_goes_first_and_takes_only_what_may_go() -> None:
    shelf = filled("a", "b")
    assert shelf.reserve("c", 10, "h", unused=True) == {}
    shelf.settle("c")
    shelf.release("c", "h")
    assert shelf.names() == ["b", "a", "c"]
    assert shelf.reserve("d", 20, "h", lambda name: name == "b") is None
    assert shelf.reserve("d", 10, "h", lambda name: name == "b") == {"b": 10}
    assert shelf.reserve("e", 10, "h") == {"c": 10}


def test_a_lease_has_one_holder_and_one_end() -> None:
    shelf = filled("a")
    shelf.lease("a", "one")
    with pytest.raises(AssertionError, match="one has a lease on a"):
        shelf.lease("a", "one")
    shelf.lease("a", "two")
    assert shelf.leases() == {"a": {"one", "two"}}
    shelf.release("a", "one")
    with pytest.raises(AssertionError, match="one has no lease on a"):
        shelf.release("a", "one")
    assert shelf.leases() == {"a": {"two"}}


class Shelves(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(100)
        self.sizes: dict[str, int] = {}
        self.leases: dict[str, set[str]] = {}
        self.next = 0

    @rule(size=st.integers(0, 60), unused=st.booleans(), spared=st.sets(st.integers(0, 40)))
    def reserve(self, size: int, unused: bool, spared: set[int]) -> None:
        name = str(self.next)
        self.next += 1
        going = self.shelf.reserve(name, size, "first", lambda other: int(other) not in spared, unused)
        if going is None:
            kept = sum(size for other, size in self.sizes.items() if self.leases[other] or int(other) in spared)
            assert kept + size > 100, "refused although it fits"
            return
        for gone, told in going.items():
            assert not self.leases.pop(gone), "evicted in use"
            assert int(gone) not in spared
            assert self.sizes.pop(gone) == told
        self.sizes[name], self.leases[name] = size, {"first"}

    @precondition(lambda self: self.sizes)
    @rule(data=st.data(), use=st.booleans())
    def lease(self, data: st.DataObject, use: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.sizes)))
        holder = f"h{self.next}"
        self.next += 1
        self.shelf.settle(name)
        self.shelf.lease(name, holder, use)
        self.leases[name].add(holder)
        if use:
            assert self.shelf.names()[0] == name

    @precondition(lambda self: any(self.leases.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name, holder = data.draw(
            st.sampled_from(sorted((name, holder) for name, of in self.leases.items() for holder in of))
        )
        self.shelf.release(name, holder)
        self.leases[name].remove(holder)

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.shelf.used_bytes == sum(self.sizes.values()) <= 100
        assert self.shelf.leases() == {name: of for name, of in self.leases.items() if of}


TestShelves = Shelves.TestCase
TestShelves.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
