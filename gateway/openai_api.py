"""The API's words: what a request may say, and what an answer says. Strict: what is not served is refused by name.

Pure. A request is taken whole, or refused with an ApiError that names the parameter and what would be accepted. Answers
are those of OpenAI's API reference, /v1/chat/completions and /v1/completions; their chunks are in sse.py.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec

from gateway.conversation import conversation_id
from gateway.decoding import bad, decode
from gateway.errors import ApiError
from gateway.generation import MAX_CHOICES, Generation, Range
from gateway.response_format import ResponseFormat, schema_of

MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Generation, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`metadata` is taken and ignored."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    response_format: ResponseFormat | None = None

    ranges: ClassVar[dict[str, Range]] = Generation.ranges | {"top_logprobs": (0, MAX_TOP_LOGPROBS)}
    prompt_name: ClassVar[str] = "messages"

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def limit_name(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"

    @property
    def schema(self) -> str:
        return schema_of(self.response_format)

    @property
    def top_logprobs_asked(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def conversation(self) -> int:
        """It begins with all that stands before the first answer."""
        first = next((n for n, message in enumerate(self.messages, 1) if message.role == "user"), len(self.messages))
        return conversation_id(self.user, [[message.role, message.text] for message in self.messages[:first]])

    def check(self) -> None:
        super().check()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise bad("max_tokens", self.max_tokens, "give either it or max_completion_tokens")
        schema_of(self.response_format)
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("invalid_request", "top_logprobs: only with logprobs: true", "top_logprobs")


class CompletionRequest(Generation, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`prompt`: one text, one list of token ids, or a list of either. `echo`, `suffix` and `best_of` are not served."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None

    ranges: ClassVar[dict[str, Range]] = Generation.ranges | {"logprobs": (0, MAX_COMPLETION_LOGPROBS)}
    default_max_tokens: ClassVar[int] = 16

    @property
    def top_logprobs_asked(self) -> int | None:
        return self.logprobs

    @property
    def conversation(self) -> int:
        """A prompt has no parts: without a user, each is a conversation of its own."""
        return conversation_id(self.user, [] if self.user else self.prompts)

    @property
    def prompts(self) -> list[str | list[int]]:
        """What to complete, each `choices` times."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [one for one in self.prompt if isinstance(one, int)]
        return [ids] if ids else [one for one in self.prompt if not isinstance(one, int)]

    def check(self) -> None:
        super().check()
        if not isinstance(self.prompt, str) and len({type(one) for one in self.prompt}) != 1:
            raise ApiError("invalid_request", "prompt: give a text, token ids, or a list of either", "prompt")
        if not all(self.prompts):
            raise ApiError("invalid_request", "prompt: give at least one token", "prompt")
        if (asked := len(self.prompts) * self.choices) > MAX_CHOICES:
            raise bad("prompt", f"{asked} choices in all", f"give at most {MAX_CHOICES}: prompts times n")


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Of all choices together; a prompt counts once. `cached_tokens`: of the prompt, found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class AnswerMessage(msgspec.Struct, frozen=True):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """`logprobs`: already encoded, as gateway/logprobs.py makes it."""

    index: int
    message: AnswerMessage
    logprobs: msgspec.Raw
    finish_reason: str


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: msgspec.Raw
    finish_reason: str


class Answer(msgspec.Struct, frozen=True):
    """`object`: chat.completion or text_completion."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChatChoice | TextChoice]
    usage: Usage


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


_CHAT = msgspec.json.Decoder(ChatRequest)
_COMPLETION = msgspec.json.Decoder(CompletionRequest)
_WORDS = {
    "role": "system, user or assistant",
    "type": "text",
    "response_format.type": "text, json_object or json_schema",
}


def parse_chat(body: bytes) -> ChatRequest:
    """Raises ApiError."""
    request: ChatRequest = decode(_CHAT, body, _WORDS)
    request.check()
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises ApiError."""
    request: CompletionRequest = decode(_COMPLETION, body, _WORDS)
    request.check()
    return request
