"""Locations: one text is one place, and nothing that could leave its root parses."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.adapters.locations import InvalidLocation, parse_location
from streams.adapters.sources import Sources
from streams.adapters.store import S3Settings


@pytest.mark.parametrize(
    "text", ["s3://adapters/acme/support/7/adapter_model.safetensors", "file:///data/in/a.safetensors", "s3://adapters"]
)
def test_read_back(text: str) -> None:
    assert str(parse_location(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "a", "/etc/passwd", "http://x/y", "https://x/y", "ftp://x/y", "S3://bucket/x", "s3:/bucket/x", "s3://", "s3:///x",
        "s3://Bucket/x", "s3://b/x", "s3://bucket//x", "s3://bucket/x/", "s3://bucket/a/../b", "s3://bucket/./b",
        "s3://bucket/..", "s3://user:secret@bucket/x", "s3://bucket/%2e%2e/x", "s3://bucket/a?versionId=1", "s3://bucket/a#b",
        "s3://bucket/a\\b", "s3://bucket/a\nb", "s3://bucket/a\x00b", "s3://bucket/" + "a/" * 600 + "a",
        "file://host/x", "file:/x", "file:////x", "file:///a/../b", "file:///a//b", "file:///a/%2e%2e/b", "file:///a/b/",
    ],
)  # fmt: skip
def test_refused(text: str) -> None:
    with pytest.raises(InvalidLocation):
        parse_location(text)


def test_a_root_holds_what_lies_below_it_alone() -> None:
    root = parse_location("s3://bucket/in")
    assert parse_location("s3://bucket/in/a/b").within(root) == ("a", "b")
    for text in ("s3://bucket/in", "s3://bucket/inside/a", "s3://bucket/a", "s3://other/in/a", "file:///bucket/in/a"):
        assert parse_location(text).within(root) is None
    assert parse_location("s3://bucket/in/a/b").beside("c") == parse_location("s3://bucket/in/a/c")


@given(st.text(max_size=60))
def test_any_text_is_itself_or_refused(tail: str) -> None:
    for prefix in ("s3://bucket/", "file:///"):
        with contextlib.suppress(InvalidLocation):
            found = parse_location(prefix + tail)
            assert str(found).rstrip("/") == (prefix + tail).rstrip("/")
            assert ".." not in found.segments


def test_sources_allow_what_is_listed() -> None:
    sources = Sources("s3://uploads/in, file:///data/{customer}", S3Settings("http://127.0.0.1:1"))
    for text, customer, allowed in (
        ("s3://uploads/in/acme/a.safetensors", "acme", True),
        ("s3://uploads/a.safetensors", "acme", False),
        ("s3://adapters/in/a.safetensors", "acme", False),
        ("file:///data/acme/a.safetensors", "acme", True),
        ("file:///data/acme/a.safetensors", "globex", False),
        ("file:///data/acme2/a.safetensors", "acme", False),
        ("file:///etc/passwd", "acme", False),
    ):
        store = sources.find(parse_location(text), customer)
        assert (store is not None) == allowed, text


def test_no_sources_allow_nothing() -> None:
    assert Sources("", S3Settings()).find(parse_location("s3://uploads/x"), "acme") is None


@pytest.mark.parametrize("text", ["/data", "s3://", "s3://bucket/../x", "http://x"])
def test_sources_that_do_not_parse(text: str) -> None:
    with pytest.raises(ValueError, match="LORAFLEET_SOURCES"):
        Sources(text, S3Settings())
