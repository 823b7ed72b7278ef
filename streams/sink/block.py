"""What is inserted at once: an offset range of each partition of one topic, and the rows that stand in it. Pure.

The bounds name the block: whoever reads the same ranges of the log again builds the same rows under the same token.
`written_ms` is part of the name, since a topic that was made anew has the same offsets again.
"""

from dataclasses import dataclass, field
from datetime import date

import msgspec

from schemas.topics import Topic
from streams.sink.rows import TABLES, row


class Bounds(msgspec.Struct, frozen=True):
    """One row of sink_progress: this block has the partition's offsets from `first` up to, not including, `next`."""

    partition: int
    first: int
    next: int


@dataclass
class Block:
    """`day` is every row's batch_day, so that all of them lie in one part, which is inserted whole or not at all."""

    topic: Topic
    written_ms: int
    day: date
    bounds: list[Bounds]
    lines: dict[str, list[bytes]] = field(default_factory=dict)  # by table

    def add(self, value: msgspec.Struct, partition: int, offset: int) -> None:
        self.lines.setdefault(TABLES[type(value)], []).append(row(value, partition, offset, self.day))

    def token(self) -> str:
        ranges = ",".join(
            f"{at.partition}:{at.first}-{at.next}" for at in sorted(self.bounds, key=lambda b: b.partition)
        )
        return f"{self.topic.name}-{self.written_ms}-{ranges}"
