"""The engine's process: one socket to its worker, a thread each way, and the step loop between them.

The step loop never waits for the network while it has rows: a reader thread fills a queue of commands and a writer
thread empties one of events. Idle, it waits up to IDLE_TICK_S for a command and then says that it lives. The socket's
end means that the worker is gone, and with it every reader of tokens: the process ends at once, there is no state to
save. An exception that is not one row's alone ends the process with status 1; the worker starts another one.
"""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from schemas.engine import Command, Event, Shutdown
from workers.engine.engine import Engine
from workers.engine.wire import BadFrame, frame, read_command

IDLE_TICK_S = 0.5
CONNECT_TIMEOUT_S = 10.0
_EVENTS_AHEAD = 1024  # a worker that is this far behind stops the engine until it reads


def connect(path: Path) -> socket.socket:
    """A stream to the worker's listening socket. Raises OSError."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(CONNECT_TIMEOUT_S)
    stream.connect(str(path))
    stream.settimeout(None)
    return stream


def serve(stream: socket.socket, build: Callable[[Callable[[Event], None]], Engine], max_rank: int) -> None:
    """Builds the engine, says Ready, and runs until Shutdown."""
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    events: queue.Queue[bytes] = queue.Queue(_EVENTS_AHEAD)
    threading.Thread(target=_read, args=(stream, commands), name="commands", daemon=True).start()
    threading.Thread(target=_write, args=(stream, events), name="events", daemon=True).start()

    def emit(event: Event) -> None:
        events.put(frame(event))

    engine = build(emit)
    emit(engine.ready(max_rank))
    said = time.monotonic()
    while True:
        if not _handle_all(engine, commands):
            break
        if engine.step():
            said = time.monotonic()
            continue
        try:
            command = commands.get(timeout=max(0.0, said + IDLE_TICK_S - time.monotonic()))
        except queue.Empty:
            engine.tick()
            said = time.monotonic()
            continue
        if isinstance(command, Shutdown):
            break
        engine.handle(command)
    events.join()


def _handle_all(engine: Engine, commands: queue.SimpleQueue[Command]) -> bool:
    """Takes what has arrived; False at Shutdown."""
    while not commands.empty():
        command = commands.get()
        if isinstance(command, Shutdown):
            return False
        engine.handle(command)
    return True


def _read(stream: socket.socket, commands: queue.SimpleQueue[Command]) -> None:
    try:
        while (command := read_command(stream)) is not None:
            commands.put(command)
    except BadFrame as error:
        print(f"engine: a frame from the worker cannot be read: {error}", flush=True)
        os._exit(1)
    os._exit(0)


def _write(stream: socket.socket, events: queue.Queue[bytes]) -> None:
    while True:
        data = events.get()
        try:
            stream.sendall(data)
        except OSError:
            os._exit(0)  # the worker is gone
        events.task_done()
