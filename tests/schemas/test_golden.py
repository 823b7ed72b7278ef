"""Every type of every topic as bytes that lie in logs: they decode to the same value for ever, whatever fields come."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.codec import UndecodableRecord, decode, encode
from schemas.topics import ADAPTER_COMMANDS, TOKENS, TOPICS, Topic
from tests.schemas.examples import EXAMPLES, GOLDEN, golden, message_types

KINDS = [(topic, kind) for topic in TOPICS for kind in message_types(topic)]
BY_NAME = pytest.mark.parametrize(("topic", "value"), EXAMPLES, ids=lambda v: v.name if isinstance(v, Topic) else "")


def unpack(topic: Topic, data: bytes) -> dict[str, Any]:
    plain = msgspec.msgpack.decode(data) if topic.wire == "msgpack" else msgspec.json.decode(data)
    assert isinstance(plain, dict)
    return plain


def pack(topic: Topic, plain: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode(plain) if topic.wire == "msgpack" else msgspec.json.encode(plain)


@pytest.mark.parametrize(("topic", "kind"), KINDS, ids=lambda v: v.name if isinstance(v, Topic) else v.__name__)
def test_every_type_has_a_golden(topic: Topic, kind: type[Any]) -> None:
    values = [value for of, value in EXAMPLES if of is topic and type(value) is kind]
    assert values, "add a value to examples.py"
    for value in values:
        assert golden(topic, value).exists(), "run python -m tests.schemas.examples, and commit what it wrote"


def test_no_golden_lost_its_type() -> None:
    known = {golden(topic, value) for topic, value in EXAMPLES}
    assert {path for path in GOLDEN.rglob("*") if path.is_file()} == known


@BY_NAME
def test_goldens_decode(topic: Topic, value: msgspec.Struct) -> None:
    assert decode(topic, golden(topic, value).read_bytes()) == value


@pytest.mark.parametrize(("topic", "kind"), KINDS, ids=lambda v: v.name if isinstance(v, Topic) else v.__name__)
def test_the_newest_example_leaves_no_field_at_its_default(topic: Topic, kind: type[Any]) -> None:
    # Else no golden would hold the field, and its renaming would go unseen.
    value = [value for of, value in EXAMPLES if of is topic and type(value) is kind][-1]
    held = unpack(topic, golden(topic, value).read_bytes())
    for field in msgspec.structs.fields(value):
        assert field.encode_name in held, f"{kind.__name__}.{field.name} is not in its newest golden"


@BY_NAME
def test_fields_with_a_default_may_be_missing(topic: Topic, value: msgspec.Struct) -> None:
    held = unpack(topic, golden(topic, value).read_bytes())
    defaults = {}
    for field in msgspec.structs.fields(value):
        if not field.required:
            held.pop(field.encode_name, None)  # an older golden has never had it
            factory = field.default_factory
            defaults[field.name] = field.default if factory is msgspec.NODEFAULT else factory()
    assert decode(topic, pack(topic, held)) == msgspec.structs.replace(value, **defaults)


@BY_NAME
def test_unknown_fields_are_skipped_but_in_commands_refused(topic: Topic, value: msgspec.Struct) -> None:
    held = unpack(topic, golden(topic, value).read_bytes()) | {"from_the_future": [1, {"a": None}]}
    if topic is ADAPTER_COMMANDS:
        with pytest.raises(UndecodableRecord, match="from_the_future"):
            decode(topic, pack(topic, held))
    else:
        assert decode(topic, pack(topic, held)) == value


def test_token_events_may_grow_at_their_end() -> None:
    path = next(path for path in GOLDEN.joinpath("tokens").iterdir())
    held = unpack(TOKENS, path.read_bytes())
    now = decode(TOKENS, path.read_bytes())
    for event in held["events"]:
        event.append("from the future")
    # Rejected and Finished have an optional last field, Tokens two: only what stands beyond them is unknown.
    longer = decode(TOKENS, pack(TOKENS, held))
    assert longer.events == now.events
    for event in held["events"]:
        del event[len(event) - {"a": 1, "t": 3, "f": 2, "r": 2}[event[0]] :]
    shorter = decode(TOKENS, pack(TOKENS, held))
    assert [type(event) for event in shorter.events] == [type(event) for event in now.events]
    assert shorter.events[2].detail == shorter.events[3].detail == ""
    assert (shorter.events[1].scores, shorter.events[1].cached) == ([], 0)


@BY_NAME
def test_damaged_records_raise(topic: Topic, value: msgspec.Struct) -> None:
    data = golden(topic, value).read_bytes()
    held = unpack(topic, data)
    name = next(field.encode_name for field in msgspec.structs.fields(value) if field.required)
    for bad in (b"", data[:-1], b"\xc1", b"null", b"[]", pack(topic, held | {name: {"not": "it"}})):
        with pytest.raises(UndecodableRecord, match=topic.name):
            decode(topic, bad)
    del held[name]
    with pytest.raises(UndecodableRecord, match=name):
        decode(topic, pack(topic, held))
    if "type" in held:
        with pytest.raises(UndecodableRecord, match="nothing-known"):
            decode(topic, pack(topic, held | {"type": "nothing-known", name: 1}))


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_a_record_that_is_nested_without_end_is_undecodable(topic: Topic) -> None:
    """Whoever may write to a topic could else end all of its readers, and again at each of their starts."""
    deep = b"\x81\xa1x" + b"\x91" * 100_000 if topic.wire == "msgpack" else b'{"x":' + b"[" * 100_000
    with pytest.raises(UndecodableRecord, match=topic.name):
        decode(topic, deep)


@given(data=st.binary(max_size=64), topic=st.sampled_from(TOPICS))
def test_noise_is_undecodable_or_typed(data: bytes, topic: Topic) -> None:
    try:
        value = decode(topic, data)
    except UndecodableRecord:
        return
    assert isinstance(value, message_types(topic))


# What both wires carry: 64-bit integers (msgpack's widest) and finite floats (JSON has no others).
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(int, st.integers(-(1 << 63), (1 << 63) - 1))


def structs(of: type[msgspec.Struct] = msgspec.Struct) -> Iterator[type[msgspec.Struct]]:
    """All that this product's messages are made of."""
    for kind in of.__subclasses__():
        if kind.__module__.startswith("schemas."):
            yield kind
        yield from structs(kind)


# Hypothesis takes msgspec's marker of a default list or dict for the default itself: give these fields always.
for kind in structs():
    if listed := [f for f in msgspec.structs.fields(kind) if f.default_factory is not msgspec.NODEFAULT]:
        st.register_type_strategy(kind, st.builds(kind, **{f.name: st.from_type(f.type) for f in listed}))


@given(data=st.data())
@settings(max_examples=150)
def test_round_trip(data: st.DataObject) -> None:
    topic, kind = data.draw(st.sampled_from(KINDS))
    value = data.draw(st.from_type(kind))
    assert decode(topic, encode(topic, value)) == value


def test_topics_are_named_once_and_known() -> None:
    assert len({topic.name for topic in TOPICS}) == len(TOPICS)
    assert {topic.wire for topic in TOPICS} == {"msgpack", "json"}
    assert all(topic.compacted == (topic.retention_ms == 0) for topic in TOPICS)
    assert Path(GOLDEN).is_dir()
