"""What a client sees of an output: tokens -> text -> up to a stop string; and which tokens' scores go with it. Pure."""

from collections import deque
from collections.abc import Iterable, Sequence

from gateway.detokenizer import Detokenizer
from gateway.stops import Stops
from gateway.vocabulary import Vocabulary
from schemas.tokens import Logprobs

Scored = tuple[int, Logprobs]


class ShownText:
    """One output's text. Stop tokens are not shown, special or not."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str], stop_ids: Iterable[int]) -> None:
        self._detokenizer = Detokenizer(vocabulary.pieces, vocabulary.lstrip)
        self._stops = Stops(stops)
        self._stop_ids = frozenset(stop_ids)
        self._made = self._shown = 0  # characters, held back ones included and not
        self._held: deque[tuple[int, Scored]] = deque()  # tokens not shown yet, each with where its text begins

    @property
    def hit(self) -> bool:
        """Whether a stop string was complete: nothing more will be shown."""
        return self._stops.hit

    def push(self, ids: Iterable[int]) -> str:
        """The text that can be shown now."""
        return self._stops.push(self._detokenizer.push(i for i in ids if i not in self._stop_ids))

    def push_scored(self, scored: Iterable[Scored]) -> tuple[str, list[Scored]]:
        """As `push`, with the tokens whose text begins in what has been shown; one without text goes with the next."""
        shown = ""
        for token, scores in scored:
            if token in self._stop_ids:
                continue
            self._held.append((self._made, (token, scores)))
            text = self._detokenizer.push((token,))
            self._made += len(text)
            shown += self._stops.push(text)
        self._shown += len(shown)
        return shown, self._freed()

    def flush(self) -> str:
        """The rest, when the output is over."""
        rest = self._stops.flush()
        self._shown += len(rest)
        return rest

    def flush_scored(self) -> tuple[str, list[Scored]]:
        rest = self.flush()
        freed = self._freed()
        if not self.hit:  # what has no text, such as the bytes of a character that never was complete
            freed += [one for _, one in self._held]
            self._held.clear()
        return rest, freed

    def _freed(self) -> list[Scored]:
        freed = []
        while self._held and self._held[0][0] < self._shown:
            freed.append(self._held.popleft()[1])
        return freed
