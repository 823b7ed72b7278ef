"""Collects every reason against a file or command, so that all are told at once. Bounded, whatever a file contains."""

from schemas.adapters import Refusal

_MOST = 50
_LONGEST = 300


class Refusals:
    """Grows by `add`; `found` is what goes into the result."""

    def __init__(self) -> None:
        self._reasons: list[Refusal] = []
        self._dropped = 0

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def add(self, field: str, message: str) -> None:
        """One reason: the field, and the value found with what would be accepted."""
        reason = Refusal(clip(field), clip(message))
        if reason in self._reasons:
            return
        if len(self._reasons) < _MOST:
            self._reasons.append(reason)
        else:
            self._dropped += 1

    def take(self, other: "Refusals") -> None:
        """Adds all of another's."""
        for reason in other._reasons:
            self.add(reason.field, reason.message)
        self._dropped += other._dropped

    @property
    def found(self) -> list[Refusal]:
        if not self._dropped:
            return list(self._reasons)
        return [*self._reasons, Refusal("refusals", f"and {self._dropped} more of the same file")]


def clip(text: str) -> str:
    """At most 300 characters, control characters made visible: it may come from an untrusted file."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:_LONGEST])
    return shown if len(text) <= _LONGEST else shown + "..."
