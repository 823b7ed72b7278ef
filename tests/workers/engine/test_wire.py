import asyncio
import socket

import pytest

from schemas.engine import CancelSequence, Command, SlotEvicted
from schemas.reasons import FinishReason
from tests.workers.engine.tiny import start
from workers.engine.wire import BadFrame, frame, read_command, read_event


def test_commands_arrive_whole_and_the_end_is_seen() -> None:
    worker, engine = socket.socketpair()
    commands: list[Command] = [start(1, list(range(5000))), CancelSequence(1, FinishReason.DEADLINE)]
    with worker, engine:
        for byte_wise in (frame(command) for command in commands):
            worker.sendall(byte_wise[:3])
            worker.sendall(byte_wise[3:])
        assert [read_command(engine), read_command(engine)] == commands
        worker.sendall(frame(commands[1])[:-1])
        worker.close()
        assert read_command(engine) is None


def test_a_frame_of_another_protocol_is_refused() -> None:
    worker, engine = socket.socketpair()
    with worker, engine:
        worker.sendall(frame(SlotEvicted("c", 1)))  # an event where a command belongs
        with pytest.raises(BadFrame):
            read_command(engine)
        worker.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(BadFrame, match="exceeds"):
            read_command(engine)


async def test_events_arrive_whole_and_the_end_is_seen() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(frame(SlotEvicted("c", 1)) + frame(SlotEvicted("d", 2)) + b"\x05")
    reader.feed_eof()
    assert [await read_event(reader) for _ in range(3)] == [SlotEvicted("c", 1), SlotEvicted("d", 2), None]
