"""The engine with a fault that begins when the file FAULT_FILE appears; the file goes when the fault is there.

garble CONTENT      torch: the bytes of the slot that holds the content are others, all of them finite numbers
swap CONTENT OTHER  torch: the slot that holds the content has the other's bytes; stamps and leases are as before
lie CONTENT COUNT   simulated: the next COUNT sequences of the content are answered like another one's
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import workers.engine.__main__ as engine
from workers.engine import simulated
from workers.engine.runner import Stamps
from workers.engine.scheduler import Outcome, Row

FILE = Path(os.environ["FAULT_FILE"])


def faulty(runner: Any) -> Any:
    run: Callable[[Sequence[Row]], list[Outcome]] = runner.run
    liars: dict[str, tuple[int, set[int]]] = {}

    def begin(kind: str, content: str, more: str = "") -> None:
        if kind == "lie":
            liars[content] = (int(more), set())
            return
        row = slot(content)
        if kind == "swap":
            row.copy_(slot(more))
        else:
            values = row[runner.stacks.pools[0].values :]
            values.copy_(values.roll(12_345))

    def slot(content: str) -> Any:
        stamps: Stamps = runner._stamps
        [number] = [lease.slot for lease in stamps._of.values() if lease.content_id == content]
        pool = runner.stacks.pool(number)
        return pool.data[number - pool.first]

    def lies(row: Row) -> bool:
        count, told = liars.get(row.sequence.content_id, (0, set()))
        if row.sequence.seq not in told and len(told) < count:
            told.add(row.sequence.seq)
        return row.sequence.seq in told

    def run_faulty(rows: Sequence[Row]) -> list[Outcome]:
        if FILE.exists():
            begin(*FILE.read_text().split())
            FILE.unlink()
        return [simulated.RESERVED_IDS + 1 if lies(row) else out for row, out in zip(rows, run(rows), strict=True)]

    runner.run = run_faulty
    return runner


if __name__ == "__main__":
    make = engine._runner
    engine._runner = lambda *how: faulty(make(*how))
    sys.exit(engine.main())
