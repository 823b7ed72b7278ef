"""Tokens' log-probabilities as the API tells them, encoded: of chat one object per token, of completions four lists.

Pure. What stands for a token is its text, with a replacement character where it holds a part of a character only;
`bytes` has it whole.
"""

from collections.abc import Iterable
from typing import Any

import orjson

from gateway.shown_text import Scored
from gateway.vocabulary import Vocabulary

LEAST = -9999.0  # OpenAI's word for a probability of 0: JSON has no infinity


def chat_logprobs(vocabulary: Vocabulary, scored: Iterable[Scored]) -> bytes:
    """{"content": [{token, logprob, bytes, top_logprobs}, ...], "refusal": null}"""

    def told(token: int, logprob: float) -> dict[str, Any]:
        raw = vocabulary.raw(token)
        return {"token": raw.decode(errors="replace"), "logprob": max(LEAST, logprob), "bytes": list(raw)}

    content = [
        told(token, scores.own) | {"top_logprobs": [told(*other) for other in scores.likeliest]}
        for token, scores in scored
    ]
    return orjson.dumps({"content": content, "refusal": None})


def text_logprobs(vocabulary: Vocabulary, scored: Iterable[Scored], offset: int) -> tuple[bytes, int]:
    """{tokens, token_logprobs, top_logprobs, text_offset}, and the offset in characters behind them."""
    tokens, own, top, offsets = [], [], [], []
    for token, scores in scored:
        text = vocabulary.raw(token).decode(errors="replace")
        tokens.append(text)
        own.append(max(LEAST, scores.own))
        top.append(
            {vocabulary.raw(other).decode(errors="replace"): max(LEAST, value) for other, value in scores.likeliest}
        )
        offsets.append(offset)
        offset += len(text)
    told = {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}
    return orjson.dumps(told), offset
