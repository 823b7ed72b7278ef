"""The worker's end of the engine: starts it, speaks with it, and finds out when it dies or hangs.

Owns the engine's process and socket. The engine ends by itself when the socket closes; it has a process group of its
own, so that a terminal's Ctrl-C reaches the worker alone, in the same session, so that the kernel wakes it out of a
stop when the worker dies. Events come in the engine's order, commands go in the caller's. A crash of either ends both.
"""

import asyncio
import logging
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from typing import NoReturn

from schemas.engine import Command, Event, Ready, Shutdown, Step
from workers.engine.wire import BadFrame, frame, read_event
from workers.settings import WorkerSettings

log = logging.getLogger(__name__)

LOAD_LIMIT_S = 600.0  # for the base model to be loaded
HUNG_S = 5.0
HUNG_STEPS = 20
FRESH_S = 2.0
FRESH_STEPS = 4
LOOK_S = 0.1
EXIT_LIMIT_S = 1.0
STOP_LIMIT_S = 3.0
_RECENT_STEPS = 16


class EngineCrashedError(Exception):
    """The engine ended or hung; every sequence in it is lost."""


class EngineClient:
    """One life of one engine: start, ready, then `events` and `watch` as tasks, at last `stop`."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ended = False
        self._silent_s = 0.0  # since the last step, counted only while this process ran
        self._stepped_at = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)  # seconds that steps took

    @property
    def ended(self) -> bool:
        """Whether it is known to be no more: what it is sent from then on, nobody runs."""
        return self._ended

    @property
    def step_s(self) -> float:
        """What a step takes of late: the median, for one slow step must not make a dead engine look busy."""
        return median(self._recent) if self._recent else 0.0

    @property
    def fresh(self) -> bool:
        """Whether the engine has just stepped or ticked: the worker's right to say that it lives."""
        return time.monotonic() - self._stepped_at <= max(FRESH_S, FRESH_STEPS * self.step_s)

    async def start(self) -> Ready:
        """Starts the process and waits until the base is loaded. Raises EngineCrashedError."""
        connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._reader is None:
                self._reader, self._writer = reader, writer
                connected.set_result(None)

        with tempfile.TemporaryDirectory(prefix="lorafleet-engine-") as folder:
            path = Path(folder) / "socket"
            server = await asyncio.start_unix_server(accept, path)
            try:
                self._spawn(path)
                while not connected.done():
                    self._raise_if_ended()
                    await asyncio.sleep(LOOK_S)
            finally:
                server.close()
        return await self._loaded()

    def send(self, command: Command) -> None:
        """Never waits. A command to an engine that is dying is lost with it."""
        assert self._writer is not None
        if not self._writer.is_closing():  # uvloop would raise, and end the worker before the crash has its name
            self._writer.write(frame(command))

    async def events(self) -> AsyncIterator[Event]:
        """Everything the engine says after Ready. Raises EngineCrashedError at its end."""
        while True:
            event = await self._next()
            if isinstance(event, Step):
                now = time.monotonic()
                if event.rows:
                    self._recent.append(now - self._stepped_at)
                self._stepped_at, self._silent_s = now, 0.0
            yield event

    async def watch(self) -> NoReturn:
        """Raises EngineCrashedError when the engine says nothing for max(HUNG_S, HUNG_STEPS steps), and kills it."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            # A pause of this very process is not the engine's silence: what it said meanwhile waits in the socket.
            self._silent_s += min(now - last, 2 * LOOK_S)
            last = now
            if self._silent_s > max(HUNG_S, HUNG_STEPS * self.step_s):
                self.kill()
                raise EngineCrashedError(f"no step for {self._silent_s:.1f} s: killed")

    def kill(self) -> None:
        self._ended = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    async def stop(self) -> None:
        """Asks it to end, then kills it; at most STOP_LIMIT_S and a little."""
        if self._writer is not None:
            self.send(Shutdown())
        code = await self._exit_code(STOP_LIMIT_S) if self._writer is not None else None
        if code is None:
            self.kill()
            await self._exit_code(EXIT_LIMIT_S)
        if self._writer is not None:
            self._writer.close()

    def _spawn(self, path: Path) -> None:
        """In the main thread and before there are others. A fork's few milliseconds matter to nobody yet."""
        self._process = subprocess.Popen(self._argv(path), stdin=subprocess.DEVNULL, process_group=0)
        log.info("engine %s: process %d", self._settings.engine, self._process.pid)

    async def _loaded(self) -> Ready:
        try:
            async with asyncio.timeout(LOAD_LIMIT_S):
                event = await self._next()
        except TimeoutError:
            self.kill()
            raise EngineCrashedError(f"the base was not loaded within {LOAD_LIMIT_S:g} s") from None
        if not isinstance(event, Ready):
            self.kill()
            raise EngineCrashedError(f"its first word was {type(event).__name__}, not Ready")
        self._stepped_at = time.monotonic()
        return event

    async def _next(self) -> Event:
        assert self._reader is not None
        try:
            event = await read_event(self._reader)
        except BadFrame as error:
            self.kill()
            raise EngineCrashedError(f"a frame that cannot be read: {error}") from error
        if event is None:
            self._ended = True
            code = await self._exit_code(EXIT_LIMIT_S)
            self.kill()
            raise EngineCrashedError(_how(code))
        return event

    async def _exit_code(self, limit_s: float) -> int | None:
        """Waits for the process to end; None if it has not."""
        end = time.monotonic() + limit_s
        while self._process is not None and (code := self._process.poll()) is None:
            if time.monotonic() > end:
                return None
            await asyncio.sleep(0.01)
        return None if self._process is None else code

    def _raise_if_ended(self) -> None:
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            raise EngineCrashedError(f"while it started: {_how(code)}")

    def _argv(self, path: Path) -> list[str]:
        s = self._settings
        options = {
            "socket": path,
            "model": s.model,
            "kind": s.engine,
            "threads": s.threads,
            "slots": s.slots,
            "max-rank": s.max_rank,
            "slot-pools": s.slot_pools,
            "kv-tokens": s.kv_tokens,
            "memory-bytes": s.memory_bytes,
            "step-ms": s.step_ms,
            "load-ms": s.load_ms,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [sys.executable, "-m", "workers.engine", *words]


def _how(code: int | None) -> str:
    if code is None:
        return "closed its socket"
    return f"killed by signal {-code}" if code < 0 else f"ended with status {code}"
