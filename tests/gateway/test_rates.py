"""A customer's minute: taken, given back, told to others and heard from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.rates import FORGET_S, Rates
from schemas.customers import Customer

ACME = Customer("acme", [], requests_per_minute=6, tokens_per_minute=600)


def test_a_minute_s_worth_at_once_and_then_as_it_fills() -> None:
    rates = Rates()
    for _ in range(6):
        rates.take(ACME, 100, 0.0)
    with pytest.raises(ApiError, match="6 requests per minute are this customer's, and 0 are left") as refused:
        rates.take(ACME, 1, 0.0)
    assert (refused.value.status, refused.value.headers()) == (429, {"Retry-After": "10"})
    rates.take(ACME, 100, 10.0)
    with pytest.raises(ApiError):
        rates.take(ACME, 1, 10.0)


def test_what_was_not_used_comes_back() -> None:
    rates = Rates()
    paid = rates.take(ACME, 600, 0.0)
    with pytest.raises(ApiError, match="600 tokens per minute") as refused:
        rates.take(ACME, 300, 0.0)
    assert refused.value.headers() == {"Retry-After": "30"}
    paid.settle(50, 0.0)
    rates.take(ACME, 550, 0.0)
    assert rates.standing(ACME, 0.0)["tokens"].remaining == 0
    assert rates.standing(ACME, 0.0)["requests"].remaining == 4


def test_refused_it_pays_for_nothing() -> None:
    rates = Rates()
    rates.take(ACME, 600, 0.0)
    for _ in range(20):
        with pytest.raises(ApiError):
            rates.take(ACME, 1, 0.0)
    assert rates.taken() == {"acme": (1, 600)}
    assert rates.standing(ACME, 0.0)["requests"].remaining == 5


def test_more_than_a_minute_holds_is_never_tried_again() -> None:
    with pytest.raises(ApiError, match="may need 601 tokens, and 600 per minute") as refused:
        Rates().take(ACME, 601, 0.0)
    assert (refused.value.status, refused.value.headers()) == (429, {"x-should-retry": "false"})


def test_who_has_no_limits_is_neither_counted_nor_told_of() -> None:
    rates, free = Rates(), Customer("free", [])
    rates.take(free, 10**9, 0.0).settle(3, 0.0)
    assert (rates.taken(), rates.standing(free, 0.0)) == ({}, {})


def test_gateways_hear_of_each_other() -> None:
    here, there = Rates(), Rates()
    paid = here.take(ACME, 500, 0.0)
    for requests, tokens in here.taken().values():
        there.taken_elsewhere(ACME, requests, tokens, 0.1)
    with pytest.raises(ApiError):
        there.take(ACME, 200, 0.1)
    paid.settle(10, 0.2)
    assert here.taken() == {"acme": (0, -490)}
    there.taken_elsewhere(ACME, 0, -490, 0.3)
    there.take(ACME, 200, 0.3)
    assert here.taken() == {}


def test_a_changed_limit_holds_at_once() -> None:
    rates = Rates()
    rates.take(ACME, 100, 0.0)
    less = Customer("acme", [], requests_per_minute=6, tokens_per_minute=60)
    with pytest.raises(ApiError, match="60 per minute"):
        rates.take(less, 100, 0.0)
    assert rates.standing(less, 0.0)["tokens"].remaining == 60


def test_full_buckets_are_forgotten() -> None:
    rates = Rates()
    for number in range(1_000):
        rates.take(Customer(f"c{number}", [], requests_per_minute=1), 1, 0.0)
    rates.tidy(FORGET_S - 1)
    assert len(rates._buckets) == 1_000
    rates.tidy(FORGET_S)
    assert not rates._buckets


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 600), st.floats(0, 1), st.booleans()), max_size=60))
def test_no_more_than_a_minute_s_worth_and_what_filled(steps: list[tuple[float, int, float, bool]]) -> None:
    """Two gateways that hear of each other at once, and settle at once or never."""
    rates, now, used = [Rates(), Rates()], 0.0, 0
    for pause, tokens, share, near in steps:
        now += pause
        mine, other = rates if near else rates[::-1]
        try:
            paid = mine.take(ACME, tokens, now)
        except ApiError:
            continue
        spent = int(tokens * share)
        paid.settle(spent, now)
        used += spent
        for requests, count in mine.taken().values():
            other.taken_elsewhere(ACME, requests, count, now)
        assert used <= 600 + now * 10 + 1
