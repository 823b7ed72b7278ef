"""The audit finds every lease whose holder is no more, tells it once, and mends nothing."""

import logging

import pytest

from schemas.engine import Leases
from schemas.reasons import Tier
from workers.audit import Incidents, of_files, of_slots


def test_leases_that_all_live_are_no_incident() -> None:
    assert not list(of_slots(Leases({1: "a", 2: "b"}, [1, 2]), {1: "a", 2: "b", 3: "", 4: "c"}))
    assert not list(of_files(Tier.RAM, {"a": {"x", "y"}}, {"x", "y", "z"}))


@pytest.mark.parametrize(
    ("leases", "attempts", "says"),
    [
        (Leases({7: "a"}, []), {}, "sequence 7 holds a and is no more"),
        (Leases({7: "a"}, [7]), {7: "b"}, "sequence 7 holds a and is to run with b"),
        (Leases({7: "a"}, [7]), {7: ""}, "is to run with"),
        (Leases({7: "a"}, []), {7: "a"}, "sequence 7 holds a and does not run"),
        (Leases({}, [7]), {7: "a"}, "sequence 7 runs without a lease"),
        (Leases({}, [], 3), {}, "3 KV blocks are held and nothing runs"),
    ],
)
def test_a_difference_between_leases_and_rows(leases: Leases, attempts: dict[int, str], says: str) -> None:
    [incident] = of_slots(leases, attempts)
    assert says in incident


def test_a_holder_that_is_no_more() -> None:
    assert list(of_files(Tier.DISK, {"a": {"x", "gone"}}, {"x"})) == ["disk: gone holds a and is no more"]


def test_an_incident_is_told_once_and_again_when_it_comes_again(caplog: pytest.LogCaptureFixture) -> None:
    incidents = Incidents()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            incidents.found("gpu", ["one"])
        incidents.found("ram", ["two"])
        incidents.found("gpu", [])
        assert (incidents.count, incidents.last) == (2, "two")
        incidents.found("gpu", ["one"])
    assert (incidents.count, incidents.last) == (3, "one")
    assert [record.message for record in caplog.records] == ["incident: one", "incident: two", "incident: one"]
