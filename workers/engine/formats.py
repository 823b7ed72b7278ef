"""The formats that running sequences are held to, and what may come next in each.

Owns one grammar per sequence that has a format, for as long as the sequence is in the engine. Grammars are begun by a
thread of their own, so that no step waits for one: a sequence gets no place in the batch before its own is there. Where
a grammar stands follows from the output alone, so that after a preemption or in another engine it stands there again.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from streams.formats.grammars import Grammar, Grammars
from streams.formats.schema import FormatRefused
from workers.engine.scheduler import Failure
from workers.engine.sequence import Sequence

Allowed = npt.NDArray[np.bool_]


class Formats:
    """Of the model in `folder`, whose logits have `vocab_size` entries. `folder` None: no format can be held."""

    def __init__(self, folder: Path | None, vocab_size: int) -> None:
        self._grammars = None if folder is None else Grammars(folder)
        self._vocab_size = vocab_size
        self._beginner = ThreadPoolExecutor(1, "grammars")  # starts its thread with the first format
        self._of: WeakKeyDictionary[Sequence, Future[Grammar]] = WeakKeyDictionary()

    def load(self) -> None:
        """Reads the tokenizer now; a model without one that fits refuses formats one by one."""
        if self._grammars is not None:
            try:
                self._grammars.load()
            except FormatRefused:
                return

    def ready(self, sequence: Sequence) -> bool:
        """Whether nothing need be waited for; the first time it is asked, its grammar is begun."""
        if not sequence.sampling.json_schema:
            return True
        if sequence not in self._of:
            self._of[sequence] = self._beginner.submit(self._begin, sequence.sampling.json_schema)
        return self._of[sequence].done()

    def allowed(self, sequence: Sequence) -> Allowed | Failure:
        """Which ids may come next in a sequence that has a format."""
        self.ready(sequence)
        try:
            grammar = self._of[sequence].result()
            grammar.take(sequence.tokens[sequence.prompt_length :])
            return grammar.allowed(self._vocab_size, list(sequence.stop_ids))
        except FormatRefused as error:
            return Failure(f"response_format: {error}")

    def _begin(self, schema: str) -> Grammar:
        if self._grammars is None:
            raise FormatRefused("this engine has no tokenizer")
        return self._grammars.start(schema)
