"""One output of a request, between its line and what its client sees of it. Pure."""

from dataclasses import dataclass, field

from gateway.flight import End
from gateway.line import Line, News
from gateway.shown_text import Scored, ShownText
from schemas.reasons import Outcome


@dataclass(frozen=True)
class Piece:
    """What can be shown now; `finish` with the last one. `failed`: it broke off, and how."""

    text: str
    scored: list[Scored] = field(default_factory=list)
    finish: str | None = None
    failed: End | None = None


class Choice:
    """`scores`: its tokens' scores were asked for."""

    def __init__(self, index: int, line: Line, text: ShownText, scores: bool) -> None:
        self.index, self.line = index, line
        self._text, self._scores = text, scores
        self.over = False

    @property
    def stopped(self) -> bool:
        """A stop string was complete: what still runs for it is for nobody."""
        return self._text.hit

    def take(self, news: News) -> Piece:
        if self._scores:
            text, scored = self._text.push_scored(zip(news.ids, news.scores, strict=True))
        else:
            text, scored = self._text.push(news.ids), []
        if self.stopped:
            self.over = True
            return Piece(text, scored, "stop")
        if news.end is None:
            return Piece(text, scored)
        self.over = True
        if news.end.outcome is not Outcome.OK:
            return Piece(text, scored, failed=news.end)
        rest, freed = self._text.flush_scored() if self._scores else (self._text.flush(), [])
        return Piece(text + rest, scored + freed, news.end.finish)
