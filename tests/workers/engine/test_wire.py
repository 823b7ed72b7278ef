import asyncio
import socket
import threading
import time

import pytest

from schemas.engine import CancelSequence, Command, SlotEvicted, SlotFailed
from schemas.reasons import FinishReason
from tests.workers.engine.tiny import start
from workers.engine.wire import BadFrame, CommandStream, frame, read_event


def test_commands_arrive_whole_and_the_end_is_seen() -> None:
    worker, engine = socket.socketpair()
    commands: list[Command] = [start(1, list(range(5000))), CancelSequence(1, FinishReason.DEADLINE)]
    first, second = map(frame, commands)
    with worker, engine:
        stream = CommandStream(engine)
        assert stream.hear(0.0) == []
        worker.sendall(first[:3])
        assert stream.hear(0.0) == []
        worker.sendall(first[3:9])
        assert stream.hear(0.0) == []
        worker.sendall(first[9:] + second + first[:5])
        assert stream.hear(0.0) == commands
        worker.sendall(first[5:] + second[:-1])
        assert stream.hear(0.0) == commands[:1]
        worker.close()
        with pytest.raises(ConnectionError):
            stream.hear(10.0)
        with pytest.raises(ConnectionError):
            stream.say(SlotEvicted("c", 1))


def test_hearing_waits_no_longer_than_it_is_told() -> None:
    worker, engine = socket.socketpair()
    with worker, engine:
        stream = CommandStream(engine)
        began = time.monotonic()
        assert stream.hear(0.05) == []
        assert time.monotonic() - began >= 0.049
        threading.Timer(0.05, worker.sendall, [frame(CancelSequence(1, FinishReason.DEADLINE))]).start()
        assert stream.hear(60.0) == [CancelSequence(1, FinishReason.DEADLINE)]
        assert time.monotonic() - began < 30


def test_a_worker_that_does_not_read_stops_nobody_until_much_is_unread() -> None:
    worker, engine = socket.socketpair()
    events = [SlotFailed(f"{number}", "x" * 1000) for number in range(4000)]
    with worker, engine:
        stream = CommandStream(engine)
        for event in events[:1000]:  # a megabyte: more than the socket takes, at most what is kept
            stream.say(event)

        def say_the_rest() -> None:
            for event in events[1000:]:
                stream.say(event)
            stream.flush()

        sender = threading.Thread(target=say_the_rest)
        sender.start()
        sender.join(0.2)
        assert sender.is_alive()
        left = b"".join(map(frame, events))
        while left:
            part = worker.recv(1 << 20)
            assert left.startswith(part)
            left = left[len(part) :]
        sender.join(10)
        assert not sender.is_alive()


def test_a_frame_of_another_protocol_is_refused() -> None:
    worker, engine = socket.socketpair()
    with worker, engine:
        stream = CommandStream(engine)
        worker.sendall(frame(SlotEvicted("c", 1)))  # an event where a command belongs
        with pytest.raises(BadFrame):
            stream.hear(1.0)
    worker, engine = socket.socketpair()
    with worker, engine:
        worker.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(BadFrame, match="exceeds"):
            CommandStream(engine).hear(1.0)
    worker, engine = socket.socketpair()
    with worker, engine:
        deep = b"\x82\xa4type\xa8shutdown\xa1x" + b"\x91" * 100_000
        worker.sendall(len(deep).to_bytes(4, "little") + deep)
        with pytest.raises(BadFrame, match="recursion"):
            CommandStream(engine).hear(1.0)


def test_commands_cut_at_any_byte_arrive_once_and_in_order() -> None:
    commands: list[Command] = [start(1, list(range(300))), CancelSequence(1, FinishReason.DEADLINE), start(2, [1])]
    data = b"".join(map(frame, commands))
    for cut in range(len(data) + 1):
        worker, engine = socket.socketpair()
        with worker, engine:
            stream = CommandStream(engine)
            worker.sendall(data[:cut])
            heard = stream.hear(0.0)
            worker.sendall(data[cut:])
            assert heard + stream.hear(0.0) == commands


async def test_events_arrive_whole_and_the_end_is_seen() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(frame(SlotEvicted("c", 1)) + frame(SlotEvicted("d", 2)) + b"\x05")
    reader.feed_eof()
    assert [await read_event(reader) for _ in range(3)] == [SlotEvicted("c", 1), SlotEvicted("d", 2), None]
