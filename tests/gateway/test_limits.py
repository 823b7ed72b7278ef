"""Open requests by customer."""

from gateway.limits import InFlight


def test_each_customer_has_its_own_limit() -> None:
    limits = InFlight()
    assert limits.enter("a", 2)
    assert limits.enter("a", 2)
    assert not limits.enter("a", 2)
    assert limits.enter("b", 1)
    limits.leave("a")
    assert limits.enter("a", 2)
    assert not limits.enter("c", 0)
    for name in ("a", "a", "b"):
        limits.leave(name)
    assert [limits.open(name) for name in "abc"] == [0, 0, 0]
