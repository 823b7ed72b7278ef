"""Where the sink is: a row of sink_progress per partition, in ClickHouse, beside what it counts.

A block's bounds are written before its rows, all in one insert; they say that every block before it is complete.
"""

from dataclasses import dataclass, field

import msgspec

from schemas.topics import Topic
from streams.sink.block import Block, Bounds
from streams.sink.rows import timestamp
from streams.sink.warehouse import Warehouse

COLUMNS = ("topic", "partition", "first_offset", "next_offset", "batch_day", "written_at")

# The newest row per partition, whatever the table has not merged yet.
SELECT = """
SELECT partition, argMax(first_offset, written_at), argMax(next_offset, written_at), argMax(batch_day, written_at),
       toUnixTimestamp64Milli(max(written_at))
FROM sink_progress WHERE topic = {topic:String} GROUP BY partition
"""


@dataclass(frozen=True)
class Progress:
    """`next`: next offset per partition that was ever read. `last`: the block that may be incomplete, without rows."""

    next: dict[int, int] = field(default_factory=dict)
    last: Block | None = None

    @property
    def written_ms(self) -> int:
        return self.last.written_ms if self.last else 0


async def read_progress(warehouse: Warehouse, topic: Topic) -> Progress:
    rows = await warehouse.query(SELECT, {"topic": topic.name})
    if not rows:
        return Progress()
    written_ms = max(written for *_, written in rows)
    # Blocks are strictly one after another, so only partitions of the newest can be incomplete.
    bounds = [Bounds(partition, first, after) for partition, first, after, _, at in rows if at == written_ms]
    [day] = {day for *_, day, at in rows if at == written_ms}
    return Progress({row[0]: row[2] for row in rows}, Block(topic, written_ms, day, bounds))


async def write_progress(warehouse: Warehouse, block: Block) -> None:
    written_at = timestamp(block.written_ms)
    lines = [
        msgspec.json.encode([block.topic.name, at.partition, at.first, at.next, block.day, written_at])
        for at in block.bounds
    ]
    await warehouse.insert("sink_progress", COLUMNS, lines)
