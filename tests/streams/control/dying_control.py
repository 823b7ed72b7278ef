"""The control process, killed by itself at its nth write to a topic: `... dying_control TOPIC before|after [N]`."""

import os
import signal
import sys
from typing import Any

import streams.control.__main__ as control
from schemas.topics import Topic
from streams.bus.writer import Writer, Written

TOPIC, WHEN, NTH = [*sys.argv[1:], "1"][:3]


class DyingWriter(Writer):
    writes = 0

    async def send(self, topic: Topic, *told: Any, **how: Any) -> Written:
        self.writes += topic.name == TOPIC
        dies = topic.name == TOPIC and self.writes == int(NTH)
        if dies and WHEN == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        written = await super().send(topic, *told, **how)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return written


if __name__ == "__main__":
    control.Writer = DyingWriter  # type: ignore[attr-defined]
    control.main()
