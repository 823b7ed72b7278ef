"""How chat's answers and completions' differ: names, the shape of a choice, of its chunks and of its scores."""

from collections.abc import Callable

import msgspec

from gateway.chunks import ChatChunks, Chunks, TextChunks
from gateway.logprobs import chat_logprobs, text_logprobs
from gateway.openai_api import AnswerMessage, ChatChoice, TextChoice
from gateway.shown_text import Scored
from gateway.vocabulary import Vocabulary

Scorer = Callable[[list[Scored]], bytes]


class Chat:
    prefix = "chatcmpl-"
    kind = "chat.completion"
    chunks: type[Chunks] = ChatChunks

    @staticmethod
    def scorer(vocabulary: Vocabulary) -> Scorer:
        """Encodes the scores of one choice's tokens, piece by piece."""
        return lambda scored: chat_logprobs(vocabulary, scored)

    @staticmethod
    def choice(index: int, text: str, logprobs: bytes, finish: str) -> ChatChoice:
        return ChatChoice(index, AnswerMessage("assistant", text), msgspec.Raw(logprobs), finish)


class Text:
    prefix = "cmpl-"
    kind = "text_completion"
    chunks: type[Chunks] = TextChunks

    @staticmethod
    def scorer(vocabulary: Vocabulary) -> Scorer:
        offset = 0

        def encode(scored: list[Scored]) -> bytes:
            nonlocal offset
            encoded, offset = text_logprobs(vocabulary, scored, offset)
            return encoded

        return encode

    @staticmethod
    def choice(index: int, text: str, logprobs: bytes, finish: str) -> TextChoice:
        return TextChoice(index, text, msgspec.Raw(logprobs), finish)


Style = type[Chat] | type[Text]
