"""Stop strings: where the shown text ends. Pure.

The text is read character by character: the first stop string to be complete ends it, and nothing of that string is
shown. Only a suffix that may still become a stop string is held back, so the result does not depend on how the text was
cut into pieces.
"""

from collections.abc import Sequence


class Stops:
    """`hit` turns true with the first complete stop string; nothing is shown after it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """The part of the text so far that can be shown now."""
        if not self._stops or self.hit:
            return "" if self.hit else text
        self._held += text
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            self.hit = True
            shown, self._held = self._held[: min(ends)[1]], ""
            return shown
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """What was held back: the output is over, so it became no stop string."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
