"""What a client sees of an output: tokens -> text -> up to a stop string. Pure."""

from collections.abc import Iterable, Sequence

from gateway.detokenizer import Detokenizer
from gateway.stops import Stops
from gateway.vocabulary import Vocabulary


class ShownText:
    """One output's text. Stop tokens are not shown, special or not."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str], stop_ids: Iterable[int]) -> None:
        self._detokenizer = Detokenizer(vocabulary.pieces, vocabulary.lstrip)
        self._stops = Stops(stops)
        self._stop_ids = frozenset(stop_ids)

    @property
    def hit(self) -> bool:
        """Whether a stop string was complete: nothing more will be shown."""
        return self._stops.hit

    def push(self, ids: Iterable[int]) -> str:
        """The text that can be shown now."""
        return self._stops.push(self._detokenizer.push(i for i in ids if i not in self._stop_ids))

    def flush(self) -> str:
        """The rest, when the output is over."""
        return self._stops.flush()
