"""The simulation's engine: the one right answer to each prompt under each adapter, a token per row and step."""

from dataclasses import dataclass
from functools import lru_cache

from schemas.reasons import FinishReason
from schemas.requests import Submit
from schemas.tokens import Finished, LoadReport, TokenEvent, Tokens

END_OF_TEXT = 1
MAX_ROWS = 4


@lru_cache(maxsize=4096)
def answer(prompt: int, content_id: str, max_tokens: int) -> tuple[int, ...]:
    """What a client must see: up to END_OF_TEXT, which most answers reach somewhere, or to max_tokens."""
    mixed = (prompt * 1_000_003) ^ (int(content_id[1:] or 0) * 7_919)
    # Two adapters differ from the first token on.
    tokens = [((mixed ^ (position * 104_729)) * 2_654_435_761 >> 7) % 50_000 + 2 for position in range(max_tokens)]
    length = 4 + mixed % 60
    if length <= max_tokens:
        tokens[length - 1 :] = [END_OF_TEXT]
    return tuple(tokens)


@dataclass
class Row:
    """One attempt in the engine. It loads its adapter until `ready_at`."""

    submit: Submit
    tokens: tuple[int, ...]  # the whole answer under the adapter it was admitted with
    position: int
    ready_at: float
    deadline_at: float
    stop: FinishReason | None = None


class Engine:
    """Rows in order of admission. `step` is one forward pass."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], Row] = {}
        self.step_number = 0

    def start(self, submit: Submit, content_id: str, ready_at: float, deadline_at: float) -> None:
        tokens = answer(submit.prompt[0], content_id, submit.max_tokens)
        key = (submit.request_id, submit.attempt)
        assert key not in self.rows, f"{key} runs twice"
        self.rows[key] = Row(submit, tokens, len(submit.generated), ready_at, deadline_at)

    def step(self, now: float) -> list[tuple[Row, TokenEvent]]:
        """The events of one step."""
        self.step_number += 1
        events: list[tuple[Row, TokenEvent]] = []
        ran = 0
        for key, row in list(self.rows.items()):
            if row.stop is not None:
                del self.rows[key]
                events.append((row, Finished(*key, row.position, row.stop)))
            elif row.ready_at <= now and ran < MAX_ROWS:
                ran += 1
                token = row.tokens[row.position]
                events.append((row, Tokens(*key, row.position, [token])))
                row.position += 1
                if row.position == len(row.tokens):
                    del self.rows[key]
                    reason = FinishReason.STOP if token == END_OF_TEXT else FinishReason.LENGTH
                    events.append((row, Finished(*key, row.position, reason)))
        return events

    def load(self, read_offset: int) -> LoadReport:
        rows = self.rows.values()
        left = sum(len(row.submit.prompt) + row.submit.max_tokens - row.position for row in rows)
        running = min(MAX_ROWS, len(rows))
        return LoadReport(read_offset, running, len(rows) - running, left)
