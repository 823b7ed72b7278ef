"""The engine between commands and events: loads, steps and ticks, whatever the runner is.

Single-threaded: commands are handled between steps, never during one. A load copies in place and blocks for its few
milliseconds. Nothing outlives a crash: the worker starts another engine and submits again.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from schemas.engine import (
    CancelSequence,
    Command,
    Event,
    FailAdapter,
    Leases,
    LoadSlot,
    Merge,
    Merged,
    MergeFailed,
    Missing,
    Ready,
    SequenceFinished,
    SlotEvicted,
    SlotFailed,
    SlotLoaded,
    StartSequence,
    Step,
    Token,
    UnloadSlot,
    Unmerge,
    Unmerged,
)
from workers.engine.runner import PROBE_TOKENS, MergeRefused, Runner
from workers.engine.scheduler import Failure, Outcome, Row, Scheduler
from workers.engine.sequence import Sequence
from workers.engine.slots import Lease, SlotInUse, Slots
from workers.slot_image import ImageError

_LOG = logging.getLogger(__name__)
FAILED_STEPS = 3
ALIVE_S = 0.5
AUDIT_S = 2.0


class Engine:
    """`emit` takes each event in order; `clock` gives seconds for the durations that events report."""

    def __init__(
        self,
        scheduler: Scheduler,
        slots: Slots,
        runner: Runner,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._slots = slots
        self._runner = runner
        self._emit = emit
        self._clock = clock
        self._loads: dict[str, Path] = {}  # content id -> image, waiting for a slot
        self._ended: list[SequenceFinished] = []  # since the last step
        self._steps = 0
        self._failed_steps = 0  # on end, with an exception in every row
        self._merged: Merged | None = None
        self.preparing = False  # a sequence waits for something that comes by itself, without a command
        self._said = self._audited = clock()  # that it lives; what its leases are

    def ready(self, max_rank: int) -> Ready:
        model, limits = self._runner.model, self._scheduler.limits
        return Ready(
            base_hash=model.base_hash,
            numeric_class=model.numeric_class,
            context_length=model.context_length,
            vocab_size=model.vocab_size,
            slots=self._slots.count,
            max_rank=max_rank,
            kv_tokens=limits.kv_tokens,
            max_rows=limits.max_rows,
        )

    def handle(self, command: Command) -> None:
        """One command other than Shutdown."""
        match command:
            case StartSequence():
                self._end(self._scheduler.start(command))
            case CancelSequence():
                self._end(self._scheduler.cancel(command.seq, command.reason))
            case LoadSlot():
                self._load(command.content_id, Path(command.path))
            case UnloadSlot():
                self._unload(command.content_id)
            case FailAdapter():
                self._ended += self._scheduler.fail_adapter(command.content_id, command.detail)
            case Merge():
                self._merge(command.content_id, Path(command.path))
            case Unmerge():
                self._unmerge()

    def step(self) -> bool:
        """Fills slots, says what is missing, and computes one step. False if there was nothing to compute."""
        self._fill_slots()
        for content_id in self._scheduler.missing():
            self._emit(Missing(content_id))
        self.preparing = False
        rows = self._scheduler.plan(self._ready)
        if rows:
            tokens, finished = self._scheduler.settle(rows, self._run(rows))
            self._report(rows, tokens, finished)
        elif self._ended:
            self.tick()
        return bool(rows)

    def _ready(self, sequence: Sequence) -> bool:
        ready = self._runner.ready(sequence)
        self.preparing |= not ready
        return ready

    def _run(self, rows: list[Row]) -> list[Outcome]:
        """Computes the step; if it cannot be computed whole, each row alone (its bits are the same), and those that
        still raise end with their reason. Raises where the engine itself must be what is broken: several rows and
        none can be computed, or a row alone for the third step on end.
        """
        try:
            outcomes = self._runner.run(rows)
        except Exception as error:
            _LOG.exception("a step of %d rows failed; each is computed alone", len(rows))
            outcomes = [self._alone(row) for row in rows]
            if all(isinstance(outcome, Failure) for outcome in outcomes):
                self._failed_steps += 1
                if len(rows) > 1 or self._failed_steps == FAILED_STEPS:
                    raise error
                return outcomes
        self._failed_steps = 0
        return outcomes

    def _alone(self, row: Row) -> Outcome:
        try:
            (outcome,) = self._runner.run([row])
        except Exception as error:
            return Failure(f"this row cannot be computed: {type(error).__name__}: {error}")
        return outcome

    def tick(self) -> None:
        """An idle step: the proof of life."""
        self._report([], [], [])

    def _report(self, rows: list[Row], tokens: list[Token], finished: list[SequenceFinished]) -> None:
        self._steps += 1
        self._said = self._clock()
        ended, self._ended = self._ended, []
        scheduler = self._scheduler
        adapters = {row.sequence.content_id for row in rows if row.sequence.content_id}
        self._emit(
            Step(
                step=self._steps,
                rows=len(rows),
                adapters=len(adapters),
                running=scheduler.running,
                waiting=scheduler.waiting,
                tokens_in_flight=scheduler.tokens_in_flight(),
                tokens=tokens,
                finished=ended + finished,
                joined=scheduler.joined(),
                cached=_cached(rows, tokens),
            )
        )

        if self._said - self._audited >= AUDIT_S:
            self._audited = self._said
            self._emit(Leases(self._slots.leases(), scheduler.adapted(), scheduler.blocks_in_use))

    def _end(self, finished: SequenceFinished | None) -> None:
        if finished is not None:
            self._ended.append(finished)

    def _load(self, content_id: str, path: Path) -> None:
        if (resident := self._slots.contents().get(content_id)) is not None:
            self._scheduler.answered(content_id)
            self._emit(SlotLoaded(content_id, *resident, bytes=0, duration_ms=0.0))
            return
        self._loads[content_id] = path

    def _fill_slots(self) -> None:
        """Each load that waits gets a slot, or its failure, or goes on waiting; the oldest need comes first."""
        blocked = []
        for content_id in self._scheduler.by_need(self._loads):
            if self._filled(content_id, self._loads[content_id]):
                del self._loads[content_id]
                self._scheduler.answered(content_id)
            else:
                blocked.append(content_id)
        self._scheduler.loads_blocked(blocked)

    def _filled(self, content_id: str, path: Path) -> bool:
        try:
            return self._placed(content_id, path) is not None
        except (ImageError, OSError) as error:
            self._emit(SlotFailed(content_id, str(error)))
            return True

    def _placed(self, content_id: str, path: Path) -> Lease | None:
        """Fills a slot with a content that is in none; None while there is no slot. Raises ImageError, OSError."""
        began = self._clock()
        pool, copy = self._runner.open(content_id, path)  # first: a bad image must evict nobody
        place = self._slots.place(content_id, self._scheduler.spared(content_id).__contains__, pool)
        if place is None:
            return None
        if place.evicted:
            self._emit(SlotEvicted(place.evicted, place.slot))
        filling = Lease(place.slot, place.epoch, content_id)
        try:
            size = copy(filling)
        except (ImageError, OSError):
            self._runner.clear(self._slots.vacate(content_id))
            raise
        self._emit(SlotLoaded(content_id, place.slot, place.epoch, size, (self._clock() - began) * 1000))
        return filling

    def _merge(self, content_id: str, path: Path) -> None:
        began, held = self._clock(), self._merged
        if held is not None and held.content_id == content_id:
            self._emit(held)
        elif held is not None:
            self._emit(MergeFailed(content_id, f"{held.content_id} is merged; Unmerge first"))
        elif busy := self._busy():
            self._emit(MergeFailed(content_id, busy))
        else:
            try:
                self._merged = self._fold(content_id, path, began)
            except (ImageError, OSError, MergeRefused) as error:
                self._emit(MergeFailed(content_id, str(error)))
            else:
                self._emit(self._merged)

    def _fold(self, content_id: str, path: Path, began: float) -> Merged:
        """Merges into weights that hold nothing while nothing runs. Raises ImageError, OSError, MergeRefused."""
        resident = self._slots.contents().get(content_id)
        filling = Lease(*resident, content_id) if resident else self._placed(content_id, path)
        if filling is None:
            raise MergeRefused("there is no slot of this adapter's rank, to compare with")
        self._loads.pop(content_id, None)  # if it was to be loaded, now it is
        self._scheduler.answered(content_id)
        with self._scheduler.lent(min(PROBE_TOKENS, self._scheduler.limits.kv_tokens)) as blocks:
            merged = self._slots.merge(content_id)
            try:
                fold = self._runner.merge(merged, filling, path, blocks, self._alive)
            except (ImageError, MergeRefused):
                self._slots.unmerge()
                raise
            except OSError as error:  # in the middle: nobody knows what the weights hold
                raise RuntimeError(f"the base cannot be read while merging: {error}") from error
        return Merged(content_id, merged.epoch, *fold, duration_ms=(self._clock() - began) * 1000)

    def _unmerge(self) -> None:
        """If nothing is merged, what was asked for holds."""
        began, held = self._clock(), self._merged
        if held is not None and (busy := self._busy()):
            self._emit(MergeFailed(held.content_id, busy))
            return
        if held is not None:
            self._runner.unmerge(self._alive)
            self._slots.unmerge()
            self._merged = None
        content_id, duration_ms = held.content_id if held else "", (self._clock() - began) * 1000
        self._emit(Unmerged(content_id, self._runner.model.numeric_class, duration_ms))

    def _busy(self) -> str:
        """Why the weights cannot change now; empty if they can."""
        running, waiting = self._scheduler.running, self._scheduler.waiting
        return f"in use: {running} sequences run, {waiting} wait; drain first" if running or waiting else ""

    def _alive(self) -> None:
        """Says so in the midst of a long command; the worker takes a silent engine for a hung one."""
        if self._clock() - self._said >= ALIVE_S:
            self.tick()

    def _unload(self, content_id: str) -> None:
        """A content that is in no slot counts as evicted from slot 0: what was asked for holds."""
        if self._loads.pop(content_id, None) is not None:
            self._scheduler.answered(content_id)
            self._emit(SlotFailed(content_id, "unloaded while it waited for a slot"))
        try:
            slot = self._slots.vacate(content_id)
        except SlotInUse:
            self._emit(SlotFailed(content_id, "in use"))
            return
        if slot:
            self._runner.clear(slot)
        self._emit(SlotEvicted(content_id, slot))


def _cached(rows: list[Row], tokens: list[Token]) -> dict[int, int]:
    """Sequence -> its prompt's tokens that stood in the prefix cache, with the first token it gives here."""
    found = {row.sequence.seq: row.sequence for row in rows if row.sequence.cached}
    return {t.seq: s.cached for t in tokens if (s := found.get(t.seq)) and t.position == s.given - s.prompt_length}
