"""Keys: who they speak for, and what they may do."""

from hashlib import sha256

import pytest

from gateway.auth import Keys
from gateway.errors import ApiError
from gateway.internal_auth import operator, pipeline
from schemas.customers import ApiKey, Customer
from schemas.reasons import Role


def customer(name: str, *keys: str, role: Role = Role.CUSTOMER) -> Customer:
    return Customer(name, [ApiKey(sha256(key.encode()).hexdigest(), key[:3], role) for key in keys])


@pytest.fixture
def keys() -> Keys:
    keys = Keys(lambda: 0.0)
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


def test_a_key_ends_with_its_time() -> None:
    now = [100.0]
    keys = Keys(lambda: now[0])
    ends = ApiKey(sha256(b"brief").hexdigest(), "bri", Role.CUSTOMER, expires_unix_ms=100_500)
    keys.apply("acme", Customer("acme", [ends]))
    assert keys.identify("Bearer brief").customer.customer == "acme"
    now[0] = 100.5
    with pytest.raises(ApiError, match=r"bri\.\.\. has expired") as refused:
        keys.identify("Bearer brief")
    assert refused.value.status == 401


@pytest.mark.parametrize(
    ("models", "allowed", "refused"),
    [
        ([], ["acme/a@1", "base"], []),
        (["acme/a"], ["acme/a@1", "acme/a@2", "acme/a:prod"], ["acme/ab@1", "base", "acme/b:prod"]),
        (["acme/a:prod", "base"], ["acme/a:prod", "base"], ["acme/a@1", "acme/a:production", "base2"]),
    ],
)
def test_a_key_may_be_bound_to_models(models: list[str], allowed: list[str], refused: list[str]) -> None:
    key = ApiKey("", "", Role.CUSTOMER, models=tuple(models))
    assert all(key.allows(model) for model in allowed)
    assert not any(key.allows(model) for model in refused)
