"""`response_format`: what the output of a chat must be. OpenAI's words, and what becomes of each. Pure.

`strict` changes nothing: the output is held to the schema whatever it says, so what OpenAI asks of strict schemas (all
properties required, no others) is not asked for here. `name` and `description` are taken and ignored.
"""

from typing import Annotated, Any

import msgspec

from gateway.errors import ApiError
from streams.formats.schema import ANY_OBJECT, FormatRefused, schema_text

PARAM = "response_format"
Name = Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class TextFormat(msgspec.Struct, frozen=True, tag="text", forbid_unknown_fields=True):
    """Anything."""


class JsonObjectFormat(msgspec.Struct, frozen=True, tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Name
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, tag="json_schema", forbid_unknown_fields=True):
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


def schema_of(asked: ResponseFormat | None) -> str:
    """As workers are told: a JSON schema's text, empty for anything. Raises ApiError."""
    match asked:
        case JsonObjectFormat():
            return ANY_OBJECT
        case JsonSchemaFormat():
            try:
                return schema_text(asked.json_schema.schema)
            except FormatRefused as error:
                raise refusal(error) from None
    return ""


def refusal(error: FormatRefused) -> ApiError:
    param = f"{PARAM}.json_schema.schema"
    return ApiError("invalid_request", f"{param}: {error}", param)
