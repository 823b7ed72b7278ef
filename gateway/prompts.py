"""What a request has to say -> token ids. What takes long is made beside the event loop, whatever makes it long."""

import asyncio
from collections.abc import Callable
from functools import partial

from gateway.base_model import BaseModel
from gateway.decoding import bad
from gateway.openai_api import ChatRequest, CompletionRequest

LONG_TEXT = 1_000  # characters; tokenizing more than this would hold up other streams
MARKS = 40  # characters that a template puts around a message, about


class Prompts:
    """Of one base model. A prompt beyond its context may be cut, to no less than one token more than that."""

    def __init__(self, model: BaseModel) -> None:
        self._model = model

    async def chat(self, asked: ChatRequest) -> list[list[int]]:
        """One prompt. Raises ApiError."""
        size = sum(len(message.text) + MARKS for message in asked.messages)
        return [await _beside(size, lambda: self._encode(self._model.template.render(asked.messages)))]

    async def completion(self, asked: CompletionRequest) -> list[list[int]]:
        """One for each that is asked for. Raises ApiError."""
        prompts = []
        for prompt in asked.prompts:
            if isinstance(prompt, str):
                prompts.append(await _beside(len(prompt), partial(self._encode, prompt)))
            else:
                self.check_ids("prompt", prompt)
                prompts.append(prompt)
        return prompts

    def check_ids(self, param: str, ids: "list[int] | dict[int, float]") -> None:
        """Raises ApiError if one is no token's."""
        known = len(self._model.vocabulary.pieces)
        if (strange := next((token for token in ids if not 0 <= token < known), None)) is not None:
            raise bad(param, strange, f"give ids of tokens, 0 to {known - 1}")

    def _encode(self, text: str) -> list[int]:
        return self._model.vocabulary.encode_within(text, self._model.context)


async def _beside(size: int, work: Callable[[], list[int]]) -> list[int]:
    return work() if size <= LONG_TEXT else await asyncio.to_thread(work)
