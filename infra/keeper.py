"""Keeps one part of a stack alive: starts it, waits until it serves, starts it again when it dies, stops it.

The back-off between starts doubles from 0.2 s to 5 s and begins anew once a life has lasted 10 s. A life that does not
become ready in time is killed and counts as a death. Children are started in the thread of the event loop, which must
be the main thread.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from infra.local.child import Child, ChildError, Spec
from infra.part import Part
from infra.progress import Progress
from infra.state import PartState, Phase

POLL_S = 0.1
FIRST_BACKOFF_S, LONGEST_BACKOFF_S, LONG_LIFE_S = 0.2, 5.0, 10.0
FIRST_STARTS = 3  # deaths before the first ready, after which the stack gives up


class Keeper:
    """`changed` is called whenever state() would differ."""

    def __init__(self, part: Part, progress: Progress, changed: Callable[[], None]) -> None:
        self.part = part
        self._progress = progress
        self._changed = changed
        self._child: Child | None = None
        self._phase = Phase.STOPPED
        self._restarts = 0
        self._since_unix_ms = 0

    def state(self) -> PartState:
        child = self._child
        return PartState(
            name=self.part.name,
            phase=self._phase,
            pid=child.pid if child and self._phase in (Phase.STARTING, Phase.READY) else 0,
            restarts=self._restarts,
            since_unix_ms=self._since_unix_ms,
            address=self.part.address,
            log=str(child.spec.log) if child else "",
        )

    async def start(self) -> None:
        """The first start, until it serves. Raises ChildError with its last words when it does not come up."""
        self._progress.waits(self.part.name)
        began_s = time.monotonic()
        for spec in self.part.before:
            await self._run(spec)
        for attempt in range(1, FIRST_STARTS + 1):
            child = await self._launch()
            if await self._serves(child):
                break
            if attempt == FIRST_STARTS:
                self._enter(Phase.DIED)
                raise ChildError(_obituary(child))
            await asyncio.sleep(FIRST_BACKOFF_S)
        self._progress.done(self.part.name, self.part.address, time.monotonic() - began_s)

    async def keep(self) -> None:
        """After start(): watches and restarts for ever."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            assert self._child is not None
            code = await ended(self._child)
            if self._child.age_s > LONG_LIFE_S:
                backoff_s = FIRST_BACKOFF_S
            self._enter(Phase.DIED)
            self._progress.died(self.part.name, code, backoff_s, str(self._child.spec.log))
            died_s = time.monotonic()
            while True:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
                try:
                    child = await self._launch(died=code)
                except (ChildError, OSError) as error:  # a full disk, a lock not yet free
                    self._progress.note(f"{self.part.name}: {error}")
                    continue
                break
            self._restarts += 1
            if await self._serves(child):
                self._progress.done(self.part.name, self.part.address, time.monotonic() - died_s)

    async def stop(self) -> None:
        """SIGTERM, SIGKILL after the part's limit; when it returns, or is cancelled, nothing of the part is left."""
        child = self._child
        if child is None:
            return
        try:
            child.terminate()
            async with asyncio.timeout(child.spec.stop_s or None):
                await ended(child)
        except TimeoutError:
            self._progress.note(f"{self.part.name} did not end within {child.spec.stop_s:g} s and was killed")
        finally:
            child.kill()
            child.stop()
            self._enter(Phase.STOPPED)

    def kill(self) -> None:
        """Ends it at once."""
        if self._child is not None:
            self._child.kill()

    async def _launch(self, died: int | None = None) -> Child:
        """`died`: how the last life ended."""
        spec = await asyncio.to_thread(self.part.prepare)
        if died is not None:
            spec = replace(spec, env={**spec.env, **self.part.again(died)})
        self._child = child = Child(spec)
        self._since_unix_ms = time.time_ns() // 1_000_000
        self._enter(Phase.STARTING)
        return child

    async def _serves(self, child: Child) -> bool:
        """Whether it became ready; if not, it is dead."""
        while child.returncode() is None:
            if await asyncio.to_thread(self.part.ready, child):
                self._enter(Phase.READY)
                return True
            if child.age_s > self.part.ready_limit_s:
                child.kill()
            await asyncio.sleep(POLL_S)
        return False

    async def _run(self, spec: Spec) -> None:
        """Runs `spec` to its end. Raises ChildError unless it succeeds."""
        self._child = child = Child(spec)
        if await ended(child):
            raise ChildError(f"{spec.name}: {child.last_words(20) or 'failed without a word'}")

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._changed()


async def ended(child: Child) -> int:
    """Its exit code, once it has one. A process sets no event."""
    while (code := child.returncode()) is None:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    return code


def _obituary(child: Child) -> str:
    name, log, code = child.spec.name, child.spec.log, child.returncode()
    return f"{name} does not start: its last try ended with {code}\n{child.last_words(12)}\nlog: {log}"
