"""Which versions a chat may be answered by, as whoever changes them knows it. Pure.

Owns, for each alias, which version it points at from when to when, and for each version until when it may be asked
for. A change is under way from the call to its answer: in between both are right. After the answer only the new one is.
Times are monotonic seconds of one clock, that of whoever asks and changes.
"""

from dataclasses import dataclass, field

NEVER = float("inf")


@dataclass
class Span:
    adapter_id: str
    since: float
    until: float = NEVER


@dataclass
class Truth:
    """`voices`: whose answers a version's are, by its id: the number of its file."""

    voices: dict[str, int] = field(default_factory=dict)
    retired: dict[str, tuple[float, float]] = field(default_factory=dict)  # the call, and its answer
    _spans: dict[str, list[Span]] = field(default_factory=dict)

    def begins(self, alias: str, adapter_id: str, at: float) -> None:
        """The alias is told to move there."""
        self._spans.setdefault(alias, []).append(Span(adapter_id, at))

    def settled(self, alias: str, adapter_id: str, at: float) -> None:
        """From now on the alias points there alone."""
        for span in self._spans[alias]:
            if span.adapter_id != adapter_id:
                span.until = min(span.until, at)
        if not any(span.adapter_id == adapter_id and span.until == NEVER for span in self._spans[alias]):
            raise ValueError(f"{alias} was never told to move to {adapter_id}")

    def ends(self, alias: str) -> set[str]:
        """Where the alias points, or is about to."""
        return {span.adapter_id for span in self._spans[alias] if span.until == NEVER}

    def right(self, model: str, asked: float, answered: float) -> set[str]:
        """The versions that may answer a chat which names `model`, and which was given its version in between."""
        if model in self._spans:
            return {s.adapter_id for s in self._spans[model] if s.since <= answered and s.until >= asked}
        return set() if self.retired.get(model, (NEVER, NEVER))[1] < asked else {model}

    def gone(self, model: str, answered: float) -> bool:
        """Whether a 404 was right."""
        return self.retired.get(model, (NEVER, NEVER))[0] <= answered
