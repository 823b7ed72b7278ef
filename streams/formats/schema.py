"""What a JSON schema may say here, before any library reads it: known keywords, and how large and deep it may be. Pure.

JSON Schema passes over keywords that it does not know, and so would the library: a misspelt one would hold nothing, and
nobody would be told. Here they are refused by name. Whether the known ones make sense is the library's to say.
"""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec

MAX_SCHEMA_BYTES = 32 << 10
MAX_DEPTH = 64  # of its JSON, not of the schemas in it alone
MAX_MULTIPLE = 1_000  # the library makes a state of each remainder: 0.5 s and 44 MB at 100,000
ANY_OBJECT = '{"type":"object"}'

_MAPS = {"properties", "$defs", "definitions"}
_LISTS = {"anyOf", "allOf", "oneOf", "prefixItems"}
_SCHEMAS = {"items", "additionalProperties"}
_PLAIN = {
    "type", "enum", "const", "required", "minProperties", "maxProperties", "minItems", "maxItems", "minLength",
    "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "$ref",
    # These hold nothing, and say something to people.
    "$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly",
    "writeOnly",
}  # fmt: skip


class FormatRefused(Exception):
    """The output cannot be held to this schema: what is in the way, and where."""


def schema_text(schema: dict[str, Any]) -> str:
    """The schema as it travels, its properties in their order. Raises FormatRefused."""
    if (deep := _depth(schema)) > MAX_DEPTH:
        raise FormatRefused(f"it is nested {deep} levels deep: give at most {MAX_DEPTH}")
    text = msgspec.json.encode(schema)
    if len(text) > MAX_SCHEMA_BYTES:
        raise FormatRefused(f"it has {len(text)} bytes: give at most {MAX_SCHEMA_BYTES}")
    for place, part in _parts("#", schema):
        _check(place, part)
    return text.decode()


def _check(place: str, part: dict[str, Any]) -> None:
    for keyword in part:
        if keyword not in _MAPS | _LISTS | _SCHEMAS | _PLAIN:
            raise FormatRefused(f"{place}: the keyword {keyword[:60]} is not served: leave it out")
    multiple = part.get("multipleOf")
    if isinstance(multiple, int | float) and _remainders(multiple) > MAX_MULTIPLE:
        raise FormatRefused(
            f"{place}: multipleOf is {multiple}: give at most {MAX_MULTIPLE}, counted in its last digit"
        )


def _remainders(multiple: float) -> int:
    """How many there are, counted in the last digit."""
    if not 0 < multiple <= MAX_MULTIPLE:  # what is not above 0 the library refuses
        return 0 if multiple <= 0 else MAX_MULTIPLE + 1
    _, digits, exponent = Decimal(repr(float(multiple))).normalize().as_tuple()
    return int("".join(map(str, digits)) + "0" * max(0, int(exponent)))


def _parts(place: str, schema: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema, itself first, and where it stands. What stands where a schema should is passed over."""
    if not isinstance(schema, dict):
        return
    yield place, schema
    for keyword, value in schema.items():
        inside = f"{place}/{keyword}"
        if keyword in _SCHEMAS:
            yield from _parts(inside, value)
        elif keyword in _MAPS and isinstance(value, dict):
            for name, part in value.items():
                yield from _parts(f"{inside}/{name}", part)
        elif keyword in _LISTS and isinstance(value, list):
            for at, part in enumerate(value):
                yield from _parts(f"{inside}/{at}", part)


def _depth(value: object) -> int:
    deep, level = 0, [value]
    while level:
        deep += 1
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return deep
