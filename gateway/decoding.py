"""From a body's bytes to a typed value, or to the one error that names the parameter and the fix. Pure."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.errors import ApiError

_MOST_SAID = 1_000
_ALIKE = 0.75  # of 1: max_token is meant to be max_tokens, store is not meant to be stop
_SHOWN = 60
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?:key` in `)?(?:\$\.?)(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)
_ENUM = re.compile(r"Invalid (?:enum )?value (?P<value>'.*)", re.DOTALL)


def decode(decoder: msgspec.json.Decoder[Any], body: bytes, words: Mapping[str, str]) -> Any:
    """The body, typed. `words`: what a parameter with a closed list takes, by its name.

    Raises ApiError naming the parameter that does not fit.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), words, _names(decoder)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError("invalid_request", f"the body is not JSON: {error}") from None
    except RecursionError:
        raise ApiError("invalid_request", "the body is not JSON that can be read: nested too deeply") from None


def bad(name: str, value: object, fix: str) -> ApiError:
    """The error for a parameter whose value is of the right type and still cannot be served."""
    return ApiError("invalid_request", f"{name} is {_shown(str(value))}: {fix}", name)


def check_within(name: str, value: float | None, least: float, most: float) -> None:
    """Raises ApiError. None is as good as absent."""
    if value is not None and not least <= value <= most:
        raise bad(name, value, f"give a number from {least} to {most}")


def _refusal(text: str, words: Mapping[str, str], known: Sequence[str]) -> ApiError:
    """`known`: the parameters of the body itself, not those inside others."""
    if len(text) > _MOST_SAID:  # it quotes names out of the body, however long
        text = text[: _MOST_SAID // 2] + text[-_MOST_SAID // 2 :]
    found = _PATH.match(text)
    what, path = (found["what"], found["path"] or "") if found else (text, "")
    path = path.removesuffix("[...]")  # msgspec does not say which key of a dict
    for pattern, message in ((_UNKNOWN, "{} is not served here: {}"), (_MISSING, "{} is missing")):
        if named := pattern.match(what):
            param = f"{path}.{named['name']}" if path else named["name"]
            meant = [] if path else difflib.get_close_matches(param[:200], known, 1, _ALIKE)
            fix = f"did you mean {meant[0]}?" if meant else "leave it out"
            return ApiError("invalid_request", message.format(_shown(param), fix), param[:200])
    if (value := _ENUM.match(what)) and (allowed := words.get(path) or words.get(path.rpartition(".")[2])):
        return ApiError("invalid_request", f"{path} is {_shown(value['value'])}: give {allowed}", path)
    return ApiError("invalid_request", f"{path or 'the body'}: {what[:1].lower()}{what[1:]}", path or None)


def _names(decoder: msgspec.json.Decoder[Any]) -> list[str]:
    body: Any = decoder.type
    return [field.encode_name for field in msgspec.structs.fields(body)]


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
