"""Open outputs by customer."""

import pytest

from gateway.errors import ApiError
from gateway.limits import InFlight


def test_each_customer_has_its_own_limit() -> None:
    limits = InFlight()
    with limits.places("a", 2), limits.places("b", 1):
        with limits.places("a", 2):
            with pytest.raises(ApiError, match="2 are, and this request asks for 1"), limits.places("a", 2):
                pass
            assert limits.open("a") == 2
        assert limits.open("a") == 1
    with pytest.raises(ApiError), limits.places("c", 0):
        pass
    assert [limits.open(name) for name in "abc"] == [0, 0, 0]


def test_many_outputs_get_all_their_places_or_none() -> None:
    limits = InFlight()
    with limits.places("a", 4) as mine:
        mine.take(2)
        with limits.places("a", 4) as others:
            with pytest.raises(ApiError, match="3 are, and this request asks for 2"):
                others.take(1)
            assert limits.open("a") == 4
        assert limits.open("a") == 3
    assert limits.open("a") == 0
