"""What chat and completion requests say alike: how the output is drawn, how long it is, how many and how it is sent.

Pure. The ranges are OpenAI's, and the engine's where OpenAI has none (workers/engine/sequence.py).
"""

import secrets
from typing import ClassVar

import msgspec

from gateway.decoding import bad, check_within
from gateway.errors import ApiError
from schemas.requests import Sampling

MAX_CHOICES = 16
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256  # each new piece of text is compared with every beginning of each
MAX_SEED = 1 << 63
MAX_BIASES = 1_024
MAX_TOP_K = (1 << 31) - 1
SEED_MASK = (1 << 63) - 1
Range = tuple[float, float]  # least, most


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Null is as good as absent; defaults are those that OpenAI documents. `user` tells conversations apart.

    `extensions` are not OpenAI's and have vLLM's names; top_k 0 and -1 mean all ids.
    """

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    ranges: ClassVar[dict[str, Range]] = {
        "temperature": (0, 2),
        "top_k": (-1, MAX_TOP_K),
        "min_p": (0, 1),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "repetition_penalty": (0.01, 100),
        "n": (1, MAX_CHOICES),
        "seed": (-MAX_SEED, MAX_SEED - 1),
    }
    extensions: ClassVar[tuple[str, ...]] = ("top_k", "min_p", "repetition_penalty")
    default_max_tokens: ClassVar[int] = 256
    prompt_name: ClassVar[str] = "prompt"

    @property
    def limit(self) -> int | None:
        """The most tokens of output that the client allows."""
        return self.max_tokens

    @property
    def limit_name(self) -> str:
        return "max_tokens"

    @property
    def top_logprobs_asked(self) -> int | None:
        """How many alternatives to report with each token's log-probability; None: report nothing."""
        return None

    @property
    def conversation(self) -> int:
        """Of the request, as gateway/conversation.py has it."""
        raise NotImplementedError

    @property
    def schema(self) -> str:
        """The text of the JSON schema that the output must fit; empty: it may be anything."""
        return ""

    @property
    def choices(self) -> int:
        """Outputs per prompt."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> list[str]:
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self) -> list[Sampling]:
        """Of each choice. Where the client gave a seed, choice i has the seed's i-th successor."""
        first = secrets.randbits(63) if self.seed is None else self.seed & SEED_MASK
        alike = self._sampling(first)
        return [msgspec.structs.replace(alike, seed=(first + i) & SEED_MASK) for i in range(self.choices)]

    def _sampling(self, seed: int) -> Sampling:
        return Sampling(
            seed=seed,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias or {},
            top_logprobs=self.top_logprobs_asked,
            json_schema=self.schema,
        )

    def check(self) -> None:
        """Raises ApiError for what is of the right type and cannot be served. The vocabulary is not known here."""
        for name, (least, most) in self.ranges.items():
            check_within(name, getattr(self, name), least, most)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise bad("top_p", self.top_p, "give a number above 0, at most 1")
        self._check_biases()
        if self.limit is not None and self.limit < 1:
            raise bad(self.limit_name, self.limit, "give at least 1")
        self._check_stops()
        if self.stream_options is not None and not self.stream:
            raise ApiError("invalid_request", "stream_options: only with stream: true", "stream_options")

    def _check_biases(self) -> None:
        biases = self.logit_bias or {}
        if len(biases) > MAX_BIASES:
            raise bad("logit_bias", f"{len(biases)} tokens", f"give at most {MAX_BIASES}")
        for token, bias in biases.items():
            if not -100 <= bias <= 100:
                raise bad("logit_bias", f"{token}: {bias}", "give numbers from -100 to 100")

    def _check_stops(self) -> None:
        if len(self.stops) > MAX_STOPS:
            raise bad("stop", self.stops, f"give at most {MAX_STOPS} strings")
        if not all(self.stops):
            raise bad("stop", self.stop, "give strings that are not empty")
        if any(len(stop) > MAX_STOP_CHARACTERS for stop in self.stops):
            raise bad("stop", self.stop, f"give strings of at most {MAX_STOP_CHARACTERS} characters")
