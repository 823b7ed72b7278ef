"""Records to bytes and back: one encoder and one decoder per topic, made once."""

from functools import lru_cache
from typing import Any

import msgspec

from schemas.topics import Topic


class UndecodableRecord(Exception):
    """A record that does not fit its topic's type: skipped and counted by readers, never guessed at."""


@lru_cache
def _decoder(topic: Topic) -> Any:
    maker = msgspec.msgpack.Decoder if topic.wire == "msgpack" else msgspec.json.Decoder
    return maker(topic.value)


_PACK = msgspec.msgpack.Encoder()
_JSON = msgspec.json.Encoder()


def encode(topic: Topic, value: msgspec.Struct) -> bytes:
    """The record's bytes in the topic's wire format."""
    return (_PACK if topic.wire == "msgpack" else _JSON).encode(value)


def decode(topic: Topic, data: bytes) -> Any:
    """The record, typed as `topic.value`. Raises UndecodableRecord."""
    try:
        return _decoder(topic).decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UndecodableRecord(f"{topic.name}: {error}") from error
