"""The engine's process as its worker sees it, the same contract for both kinds."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec
import pytest

from schemas.engine import (
    CancelSequence,
    Command,
    Event,
    FailAdapter,
    LoadSlot,
    Merge,
    Merged,
    MergeFailed,
    Missing,
    Ready,
    SequenceFinished,
    Shutdown,
    SlotEvicted,
    SlotFailed,
    SlotLoaded,
    Step,
    UnloadSlot,
    Unmerge,
    Unmerged,
)
from schemas.reasons import FinishReason
from streams.adapters.shape import ModelShape
from tests.workers.engine.tiny import MAX_RANK, adapter, content_id, image, start
from workers.engine.simulated import simulated_token
from workers.engine.wire import frame

E = TypeVar("E")
_EVENTS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
SLOTS = 2


class Spoken:
    """A listening worker and the engine process that it started."""

    def __init__(self, model: Path, kind: str, *more: str) -> None:
        self._folder = TemporaryDirectory(prefix="lf-")
        path = f"{self._folder.name}/s"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen()
            listening.settimeout(100)
            options = ["--socket", path, "--model", str(model), "--kind", kind, "--threads", "2", "--slots", str(SLOTS)]
            options += ["--max-rank", str(MAX_RANK), "--kv-tokens", "2048", *more]
            self.process = subprocess.Popen([sys.executable, "-m", "workers.engine", *options])
            self.stream, _ = listening.accept()
        self.stream.settimeout(100)
        self.events: list[Event] = []
        self._seq = 0

    def close(self) -> None:
        self.stream.close()
        self.process.wait(20)
        self._folder.cleanup()

    def say(self, *commands: Command) -> None:
        for command in commands:
            self.stream.sendall(frame(command))

    def hear(self) -> Event:
        head = self._exactly(4)
        event = _EVENTS.decode(self._exactly(int.from_bytes(head, "little")))
        self.events.append(event)
        return event

    def until(self, kind: type[E]) -> E:
        while not isinstance(event := self.hear(), kind):
            pass
        return event

    def finish(self, *seqs: int) -> dict[int, SequenceFinished]:
        """Hears until these sequences have ended; they may have already."""
        while True:
            steps = [event for event in self.events if isinstance(event, Step)]
            ended = {one.seq: one for step in steps for one in step.finished}
            if set(seqs) <= ended.keys():
                return ended
            self.hear()

    def tokens(self, seq: int) -> list[int]:
        own = [token for step in self.events if isinstance(step, Step) for token in step.tokens if token.seq == seq]
        assert [token.position for token in own] == list(range(len(own)))
        return [token.id for token in own]

    def new(self) -> int:
        self._seq += 1
        return self._seq

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.stream.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data


@pytest.fixture(scope="module", params=["simulated", "torch"])
def engine(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Spoken]:
    # Steps slow enough for a test on a busy machine to interrupt a sequence.
    spoken = Spoken(tiny, request.param, "--step-ms", "5")
    yield spoken
    spoken.close()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, shape: ModelShape) -> dict[str, LoadSlot]:
    folder = tmp_path_factory.mktemp("images")
    return {name: image(folder, shape, name, adapter(shape, seed)) for seed, name in enumerate("abcd")}


def test_it_says_what_it_is_and_that_it_lives(engine: Spoken, shape: ModelShape) -> None:
    ready = engine.until(Ready)
    assert (ready.context_length, ready.vocab_size) == (shape.context, shape.vocab)
    assert (ready.slots, ready.max_rank, ready.kv_tokens) == (SLOTS, MAX_RANK, 2048)
    assert len(ready.base_hash) == 64
    first, second = engine.until(Step), engine.until(Step)
    assert (first.rows, second.step) == (0, first.step + 1)


def test_tokens_come_in_order_and_the_end_with_its_reason(engine: Spoken) -> None:
    one, other = engine.new(), engine.new()
    engine.say(start(one, [5, 6, 7], max_tokens=9), start(other, list(range(200)), max_tokens=4))
    ended = engine.finish(one, other)
    assert [len(engine.tokens(seq)) for seq in (one, other)] == [9, 4]
    assert ended[one] == SequenceFinished(one, 9, FinishReason.LENGTH, "", 0, 0)
    stopped, halfway = engine.new(), engine.new()
    tokens = engine.tokens(one)
    engine.say(
        start(stopped, [5, 6, 7], max_tokens=9, stop_ids=[tokens[4]]),
        start(halfway, [5, 6, 7], max_tokens=9, generated=tokens[:6]),
    )
    ended = engine.finish(stopped, halfway)
    length = tokens.index(tokens[4]) + 1
    assert (ended[stopped].length, ended[stopped].reason) == (length, FinishReason.STOP)
    assert engine.tokens(stopped) == tokens[:length]
    again = [token for event in engine.events if isinstance(event, Step) for token in event.tokens]
    assert [token.id for token in again if token.seq == halfway] == tokens[6:]


def test_a_missing_adapter_is_asked_for_loaded_and_served(engine: Spoken, images: dict[str, LoadSlot]) -> None:
    base, adapted, also = engine.new(), engine.new(), engine.new()
    engine.say(start(base, [9, 9]), start(adapted, [9, 9], "a"), start(also, [9, 9], "a"))
    assert engine.until(Missing).content_id == content_id("a")
    engine.finish(base)
    engine.say(images["a"])
    loaded = engine.until(SlotLoaded)
    assert loaded.content_id == content_id("a")
    assert loaded.bytes > 0
    ended = engine.finish(adapted, also)
    assert (ended[adapted].slot, ended[adapted].epoch) == (loaded.slot, loaded.epoch)
    assert engine.tokens(adapted) == engine.tokens(also) != engine.tokens(base)


def test_slots_are_evicted_when_idle_and_images_checked(engine: Spoken, images: dict[str, LoadSlot]) -> None:
    engine.say(images["b"], images["c"])
    engine.until(SlotEvicted)
    engine.until(SlotLoaded)
    engine.say(LoadSlot(content_id("d"), images["a"].path))
    assert "holds content" in engine.until(SlotFailed).reason
    engine.say(UnloadSlot(content_id("c")))
    assert engine.until(SlotEvicted).content_id == content_id("c")


def test_sequences_are_cancelled_in_any_state(engine: Spoken) -> None:
    running, waiting, done = engine.new(), engine.new(), engine.new()
    crowd = [engine.new() for _ in range(3)]  # of as many tokens as the KV cache holds
    engine.say(start(done, [1], max_tokens=1))
    engine.finish(done)
    engine.say(*(start(seq, [1], max_tokens=400) for seq in (running, *crowd)), start(waiting, [1], "d"))
    engine.until(Missing)
    engine.say(*(CancelSequence(seq, FinishReason.CANCELLED) for seq in crowd))
    engine.say(*(CancelSequence(seq, FinishReason.GATEWAY_LOST) for seq in (running, waiting, done)))
    ended = engine.finish(running, waiting)
    assert {ended[seq].reason for seq in (running, waiting)} == {FinishReason.GATEWAY_LOST}
    assert ended[done].reason is FinishReason.LENGTH
    assert ended[running].length == len(engine.tokens(running)) < 400
    assert ended[waiting].length == 0
    failed = engine.new()
    engine.say(FailAdapter(content_id("d"), "stale"), start(failed, [1], "d"))
    engine.until(Missing)
    engine.say(FailAdapter(content_id("d"), "not to be had"))
    assert engine.finish(failed)[failed].reason is FinishReason.LOAD_FAILED
    rest = engine.until(Step)
    assert (rest.running, rest.waiting, rest.tokens_in_flight) == (0, 0, 0)


def test_an_adapter_is_merged_served_alone_and_taken_out(engine: Spoken, images: dict[str, LoadSlot]) -> None:
    base, slotted, merged, other, busy, again = (engine.new() for _ in range(6))
    engine.say(images["a"], start(base, [9, 8]), start(slotted, [9, 8], "a"))
    engine.finish(base, slotted)
    engine.say(Merge(images["a"].content_id, images["a"].path))
    folded = engine.until(Merged)
    assert folded.content_id == content_id("a")
    assert folded.worst <= folded.tolerance
    engine.say(start(merged, [9, 8], "a"), start(other, [9, 8]))
    ended = engine.finish(merged, other)
    assert engine.tokens(merged) == engine.tokens(slotted) != engine.tokens(base)
    assert (ended[merged].slot, ended[merged].epoch) == (0, folded.epoch)
    assert (ended[other].reason, ended[other].length) == (FinishReason.ERROR, 0)
    assert "merged into the weights" in ended[other].detail
    engine.say(start(busy, [9, 8], "a", max_tokens=400), Unmerge(), CancelSequence(busy, FinishReason.CANCELLED))
    assert engine.until(MergeFailed).content_id == content_id("a")
    engine.finish(busy)
    engine.say(Unmerge())
    back = engine.until(Unmerged)
    assert back.content_id == content_id("a")
    assert folded.numeric_class.startswith(f"{back.numeric_class}/merged-")
    engine.say(start(again, [9, 8]))
    engine.finish(again)
    assert engine.tokens(again) == engine.tokens(base)


def test_simulated_tokens_can_be_foretold(tiny: Path, shape: ModelShape, images: dict[str, LoadSlot]) -> None:
    engine = Spoken(tiny, "simulated", "--step-ms", "1")
    try:
        engine.say(images["a"], start(1, [4, 5], "a", max_tokens=6), start(2, [4, 5], max_tokens=6))
        engine.finish(1, 2)
        for seq, content in ((1, content_id("a")), (2, "")):
            assert engine.tokens(seq) == [simulated_token(content, [4, 5], at, shape.vocab) for at in range(6)]
        assert "torch" not in simulated_modules()
    finally:
        engine.close()


def simulated_modules() -> str:
    code = "import sys, workers.engine.simulated, workers.engine.__main__; print(*sys.modules)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("last_words", "status"), [(b"", 0), (frame(Shutdown()), 0), (b"\x01\0\0\0\xc1", 1)])
def test_it_ends_with_its_worker(tiny: Path, last_words: bytes, status: int) -> None:
    engine = Spoken(tiny, "simulated", "--step-ms", "20")
    try:
        engine.say(start(1, [1], max_tokens=500))
        while not (isinstance(event := engine.hear(), Step) and event.tokens):
            pass
        engine.stream.sendall(last_words)
        if not last_words:
            engine.stream.close()
        began = time.monotonic()
        assert engine.process.wait(20) == status
        assert time.monotonic() - began < 10
    finally:
        engine.close()


def test_a_model_that_cannot_be_served_ends_it_before_ready(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    engine = Spoken(tmp_path, "simulated")
    try:
        with pytest.raises(EOFError):
            engine.hear()
        assert engine.process.wait(20) == 1
    finally:
        engine.close()
