"""The control process, killed by itself at its first write to a topic: `... dying_control TOPIC before|after`."""

import os
import signal
import sys
from typing import Any

import streams.control.__main__ as control
from schemas.topics import Topic
from streams.bus.writer import Writer, Written

TOPIC, WHEN = sys.argv[1:]


class DyingWriter(Writer):
    async def send(self, topic: Topic, *told: Any, **how: Any) -> Written:
        if topic.name == TOPIC and WHEN == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        written = await super().send(topic, *told, **how)
        if topic.name == TOPIC:
            os.kill(os.getpid(), signal.SIGKILL)
        return written


if __name__ == "__main__":
    control.Writer = DyingWriter  # type: ignore[attr-defined]
    control.main()
