"""The engine's process: the step loop, and between steps the socket to its worker.

One thread computes and speaks: handing a message to another thread costs more than the message. Between steps it takes
what has arrived and never waits while it has rows; idle, it waits up to IDLE_TICK_S and then says that it lives. A
second thread waits for one thing, the socket's end, which means that the worker is gone, and with it every reader of
tokens: the process ends at once, in the midst of a step too, there is no state to save. An exception that is not one
row's alone ends the process with status 1; the worker starts another one.
"""

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from schemas.engine import Event, Shutdown
from workers.engine.engine import Engine
from workers.engine.wire import CommandStream

IDLE_TICK_S = 0.5
PREPARING_S = 0.002  # between looks at what is prepared beside this thread
CONNECT_TIMEOUT_S = 10.0


def connect(path: Path) -> socket.socket:
    """A stream to the worker's listening socket. Raises OSError."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(CONNECT_TIMEOUT_S)
    stream.connect(str(path))
    return stream


def serve(stream: socket.socket, build: Callable[[Callable[[Event], None]], Engine], max_rank: int) -> None:
    """Builds the engine, says Ready, and runs until Shutdown. Raises BadFrame, ConnectionError (the worker is gone)."""
    threading.Thread(target=_end_with, args=(stream,), name="the worker's end", daemon=True).start()
    worker = CommandStream(stream)
    engine = build(worker.say)
    worker.say(engine.ready(max_rank))
    said, stepped = time.monotonic(), False
    while True:
        patience_s = PREPARING_S if engine.preparing else said + IDLE_TICK_S - time.monotonic()
        for command in worker.hear(0.0 if stepped else max(0.0, patience_s)):
            if isinstance(command, Shutdown):
                worker.flush()
                return
            engine.handle(command)
        stepped = engine.step()
        if not stepped and time.monotonic() >= said + IDLE_TICK_S:
            engine.tick()
            stepped = True
        if stepped:
            said = time.monotonic()


def _end_with(stream: socket.socket) -> None:
    gone = select.poll()
    gone.register(stream, select.POLLRDHUP)
    gone.poll()
    os._exit(0)
