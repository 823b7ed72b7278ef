"""Keys: who they speak for, and what they may do."""

from hashlib import sha256

import pytest

from gateway.auth import Keys
from gateway.errors import ApiError
from gateway.internal_auth import operator, pipeline
from gateway.internal_customers import CustomerChange, changed
from schemas.customers import ApiKey, Customer
from schemas.reasons import Role


def customer(name: str, *keys: str, role: Role = Role.CUSTOMER) -> Customer:
    return Customer(name, [ApiKey(sha256(key.encode()).hexdigest(), key[:3], role) for key in keys])


@pytest.fixture
def keys() -> Keys:
    keys = Keys()
    keys.apply("acme", customer("acme", "one", "two"))
    keys.apply("ops", customer("ops", "op", role=Role.OPERATOR))
    keys.apply("globex", customer("globex", "pipe", role=Role.PIPELINE))
    return keys


NOT_VALID = [None, "", "one", "Basic one", "Bearer", "Bearer ", "Bearer three", "Bearer one two", "Bearer \udcff"]


@pytest.mark.parametrize("header", NOT_VALID)
def test_no_valid_key(keys: Keys, header: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        keys.identify(header)
    assert (refused.value.status, refused.value.shape.code) == (401, "invalid_api_key")


@pytest.mark.parametrize("header", ["Bearer one", "bearer two", "Bearer  one "])
def test_a_valid_key(keys: Keys, header: str) -> None:
    assert keys.identify(header).customer.customer == "acme"


def test_a_key_that_is_left_out_ends(keys: Keys) -> None:
    keys.apply("acme", customer("acme", "two"))
    assert keys.identify("Bearer two").customer.customer == "acme"
    with pytest.raises(ApiError):
        keys.identify("Bearer one")
    keys.apply("acme", None)
    with pytest.raises(ApiError):
        keys.identify("Bearer two")


def test_roles(keys: Keys) -> None:
    assert operator(keys, "Bearer op").customer.customer == "ops"
    assert pipeline(keys, "Bearer pipe", "globex").role is Role.PIPELINE
    assert pipeline(keys, "Bearer op", "acme").role is Role.OPERATOR
    for header, owner in (("Bearer pipe", "acme"), ("Bearer one", "acme")):
        with pytest.raises(ApiError) as refused:
            pipeline(keys, header, owner)
        assert refused.value.status == 403
    with pytest.raises(ApiError) as refused:
        operator(keys, "Bearer pipe")
    assert refused.value.status == 403


def test_a_change_keeps_what_it_does_not_name() -> None:
    first = changed(None, "acme", CustomerChange(max_in_flight=3), "lf-aaaaaaaaaa", 1)
    second = changed(first, "acme", CustomerChange(role=Role.PIPELINE), "lf-bbbbbbbbbb", 2)
    assert (second.max_in_flight, [key.role for key in second.keys]) == (3, [Role.CUSTOMER, Role.PIPELINE])
    third = changed(second, "acme", CustomerChange(revoke=["lf-aaaaaa"]), "lf-cccccccccc", 3)
    assert [key.hint for key in third.keys] == ["lf-bbbbbb", "lf-cccccc"]


BAD = [CustomerChange(max_in_flight=-1), CustomerChange(weight=0), CustomerChange(revoke=["no"])]


@pytest.mark.parametrize("change", BAD)
def test_a_bad_change_is_refused(change: CustomerChange) -> None:
    with pytest.raises(ApiError) as refused:
        changed(None, "acme", change, "lf-x", 1)
    assert refused.value.param in ("max_in_flight", "weight", "revoke")
