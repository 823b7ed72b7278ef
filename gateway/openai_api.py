"""The chat API's words: what a request may say, and what an answer says. Strict: what is not served is refused by name.

Pure. A request is taken whole, or refused with an ApiError that names the parameter and what would be accepted.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from gateway.errors import ApiError

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256  # each new piece of text is compared with every beginning of each
MAX_SEED = 1 << 63
_MOST_SAID = 1_000
_SHOWN = 60


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None


class ChatRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defaults are those that OpenAI documents. `user` and `metadata` are taken and ignored."""

    model: str
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens of output that the client allows."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def limit_name(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"

    @property
    def stops(self) -> list[str]:
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerMessage(msgspec.Struct, frozen=True):
    role: str
    content: str
    refusal: None = None


class Choice(msgspec.Struct, frozen=True):
    index: int
    message: AnswerMessage
    logprobs: None
    finish_reason: str


class ChatAnswer(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: str = "chat.completion"


class Model(msgspec.Struct, frozen=True):
    """`root` is what answers, `parent` the base model under an adapter."""

    id: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    object: str = "model"


class ModelList(msgspec.Struct, frozen=True):
    data: list[Model]
    object: str = "list"


_DECODER = msgspec.json.Decoder(ChatRequest)
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?:\$\.?)(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)
_ENUM = re.compile(r"Invalid enum value (?P<value>.*)", re.DOTALL)
_CHAT_WORDS = {"role": "system, user or assistant", "type": "text"}


def parse_chat(body: bytes) -> ChatRequest:
    """Raises ApiError."""
    request: ChatRequest = decode(_DECODER, body, _CHAT_WORDS)
    _check(request)
    return request


def decode(decoder: msgspec.json.Decoder[Any], body: bytes, words: Mapping[str, str]) -> Any:
    """The body, typed. `words`: what a parameter with a closed list takes, by its name.

    Raises ApiError naming the parameter that does not fit.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), words) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError("invalid_request", f"the body is not JSON: {error}") from None
    except RecursionError:
        raise ApiError("invalid_request", "the body is not JSON that can be read: nested too deeply") from None


def _refusal(text: str, words: Mapping[str, str]) -> ApiError:
    if len(text) > _MOST_SAID:  # it quotes names out of the body, however long
        text = text[: _MOST_SAID // 2] + text[-_MOST_SAID // 2 :]
    found = _PATH.match(text)
    what, path = (found["what"], found["path"] or "") if found else (text, "")
    path = path.removesuffix("[...]")  # msgspec does not say which key of a dict
    for pattern, message in ((_UNKNOWN, "{} is not served here: leave it out"), (_MISSING, "{} is missing")):
        if named := pattern.match(what):
            param = f"{path}.{named['name']}" if path else named["name"]
            return ApiError("invalid_request", message.format(_shown(param)), param[:200])
    if (value := _ENUM.match(what)) and (allowed := words.get(path.rpartition(".")[2])):
        return ApiError("invalid_request", f"{path} is {_shown(value['value'])}: give {allowed}", path)
    return ApiError("invalid_request", f"{path or 'the body'}: {what[:1].lower()}{what[1:]}", path or None)


def _check(request: ChatRequest) -> None:
    _within("temperature", request.temperature, 0, 2)
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise _bad("top_p", request.top_p, "give a number above 0, at most 1")
    if request.n not in (None, 1):
        raise _bad("n", request.n, "only 1 is served")
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise _bad("max_tokens", request.max_tokens, "give either it or max_completion_tokens")
    if request.limit is not None and request.limit < 1:
        raise _bad(request.limit_name, request.limit, "give at least 1")
    _within("seed", request.seed, -MAX_SEED, MAX_SEED - 1)
    if len(request.stops) > MAX_STOPS:
        raise _bad("stop", request.stops, f"give at most {MAX_STOPS} strings")
    if not all(request.stops):
        raise _bad("stop", request.stop, "give strings that are not empty")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in request.stops):
        raise _bad("stop", request.stop, f"give strings of at most {MAX_STOP_CHARACTERS} characters")
    if request.stream_options is not None and not request.stream:
        raise ApiError("invalid_request", "stream_options: only with stream: true", "stream_options")


def _within(name: str, value: float | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise _bad(name, value, f"give a number from {least} to {most}")


def _bad(name: str, value: object, fix: str) -> ApiError:
    return ApiError("invalid_request", f"{name} is {_shown(str(value))}: {fix}", name)


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
