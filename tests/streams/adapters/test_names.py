"""Names of customers, adapters and aliases: what is accepted, what is refused, and that they read back."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.adapters.names import (
    AdapterName,
    AliasName,
    InvalidName,
    parse_adapter,
    parse_alias,
    parse_customer,
    parse_model,
)

WORD = st.from_regex(r"\A[a-z0-9]([a-z0-9_-]{0,62}[a-z0-9])?\Z")


def test_the_forms_of_the_brief() -> None:
    assert parse_adapter("acme/support@7") == AdapterName("acme", "support", 7)
    assert parse_alias("acme/support:prod") == AliasName("acme", "support", "prod")
    assert parse_model("acme/support@7") == AdapterName("acme", "support", 7)
    assert parse_model("acme/support:prod") == AliasName("acme", "support", "prod")
    assert parse_customer("acme") == "acme"


@pytest.mark.parametrize(
    "text",
    [
        "", "acme", "acme/support", "acme/support@", "acme/support@0", "acme/support@07", "acme/support@-1",
        "acme/support@1.0", "acme/support@1234567890", "Acme/support@1", "acme/Support@1", "acme//support@1",
        "/acme/support@1", "acme/a/b@1", "../etc@1", "acme/..@1", "acme/.hidden@1", "acme/support@1\n",
        " acme/support@1",
        "acme/support@1 ", "acme/support@１", "аcme/support@1", "acme/sup\x00port@1", "acme/support:prod@1",
        "acme/-x@1", "acme/x-@1", "a" * 65 + "/support@1", "acme/" + "a" * 65 + "@1", "acme%2fsupport@1",
    ],
)  # fmt: skip
def test_refused_adapter_ids(text: str) -> None:
    with pytest.raises(InvalidName) as refused:
        parse_adapter(text)
    assert "customer/name@version" in str(refused.value)
    with pytest.raises(InvalidName):
        parse_model(text)


@pytest.mark.parametrize(
    "text", ["acme/support:", "acme/support:Prod", "acme/support@7", "acme:prod", "acme/a/b:x", "acme/s:a:b", "smollm2"]
)  # fmt: skip
def test_refused_aliases(text: str) -> None:
    with pytest.raises(InvalidName):
        parse_alias(text)


@pytest.mark.parametrize("text", ["", "a/b", "a@1", "a:b", "A", "-a", "a" * 65, "a\n", "."])
def test_refused_customers(text: str) -> None:
    with pytest.raises(InvalidName):
        parse_customer(text)


def test_a_long_text_is_shortened_in_the_message() -> None:
    with pytest.raises(InvalidName) as refused:
        parse_adapter("x" * 10_000)
    assert len(str(refused.value)) < 300


@given(WORD, WORD, st.integers(1, 999_999_999))
def test_an_adapter_id_reads_back(customer: str, name: str, version: int) -> None:
    parsed = AdapterName(customer, name, version)
    assert parse_adapter(str(parsed)) == parsed
    assert str(parsed).count("/") == 1


@given(WORD, WORD, WORD)
def test_an_alias_reads_back(customer: str, name: str, label: str) -> None:
    parsed = AliasName(customer, name, label)
    assert parse_alias(str(parsed)) == parsed


@given(st.text(max_size=100))
def test_any_text_is_parsed_to_itself_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidName):
        assert str(parse_model(text)) == text
