"""Files that are cut or written over while the engine has them: one load's trouble, never the process's."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from schemas.engine import LoadSlot, Merge, MergeFailed, SlotFailed, SlotLoaded
from schemas.reasons import FinishReason
from streams.adapters.shape import ModelShape
from tests.workers.engine.tiny import MAX_RANK, InProcess, adapter, content_id, image, save_tiny, start
from workers.engine import torch_runner
from workers.engine.model import LlamaModel
from workers.engine.native import NativeOperations
from workers.engine.operations import Operations
from workers.engine.reference import ReferenceOperations
from workers.engine.stacks import SlotStacks
from workers.engine.torch_runner import TorchRunner, tokens_batch
from workers.slot_image import SlotImage

BATCH = tokens_batch([([1, 2, 3], 0, [0])])


@pytest.fixture
def engine(native: NativeOperations, tiny: Path) -> InProcess:
    return InProcess(TorchRunner(tiny, "h", native, {MAX_RANK: 2}, 512), 2)


@pytest.fixture
def cut_when_opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The image that is opened the n-th time from here on is cut right after."""
    left = [0]

    def opened(path: Path, *what: object) -> SlotImage:
        found = real(path, *what)  # type: ignore[arg-type]
        left[0] -= 1
        if left[0] == 0:
            os.truncate(path, 8192)
        return found

    real = torch_runner.open_image  # type: ignore[attr-defined]
    monkeypatch.setattr(torch_runner, "open_image", opened)
    return lambda times: left.__setitem__(0, times)


def loads(shape: ModelShape, folder: Path) -> tuple[LoadSlot, LoadSlot]:
    return image(folder, shape, "a", adapter(shape, 1)), image(folder, shape, "b", adapter(shape, 2))


def test_an_image_cut_on_its_way_into_a_slot_ends_its_load_alone(
    engine: InProcess, shape: ModelShape, tmp_path: Path, cut_when_opened: Callable[[int], None]
) -> None:
    a, b = loads(shape, tmp_path)
    engine.say(start(1, [5, 6], "a", max_tokens=3), start(2, [5, 6], max_tokens=3), a).run()
    engine.say(start(3, [5, 6], "a", max_tokens=3), start(4, [5, 6], "b", max_tokens=3))
    cut_when_opened(1)
    engine.say(b).run()
    (failed,) = [event for event in engine.events if isinstance(event, SlotFailed)]
    assert failed.content_id == content_id("b")
    assert "cut" in failed.reason
    assert engine.tokens(3) == engine.tokens(1) != engine.tokens(2)
    assert engine.slots.contents().keys() == {content_id("a")}
    # The slot that was half filled is taken by nobody's weights, and by the next that is whole.
    again = image(tmp_path, shape, "b", adapter(shape, 2))
    engine.say(again).run()
    assert engine.finished(4).reason is FinishReason.LENGTH
    assert [e.content_id for e in engine.events if isinstance(e, SlotLoaded)] == [content_id("a"), content_id("b")]


def test_an_image_cut_while_it_is_merged_leaves_the_base(
    engine: InProcess, shape: ModelShape, tmp_path: Path, cut_when_opened: Callable[[int], None]
) -> None:
    a, _ = loads(shape, tmp_path)
    engine.say(start(1, [5, 6])).run()
    cut_when_opened(2)  # once for its slot, once to be folded
    engine.say(Merge(a.content_id, a.path))
    assert isinstance(engine.events[-1], MergeFailed)
    assert "cut" in engine.events[-1].reason
    engine.say(start(2, [5, 6])).run()
    assert engine.tokens(2) == engine.tokens(1)


@pytest.mark.parametrize("path", ["/nowhere", "/tmp", "a\0b", "", "/proc/self/mem", "pipe"])
def test_a_path_that_is_no_image_s_is_refused(engine: InProcess, tmp_path: Path, path: str) -> None:
    if path == "pipe":
        os.mkfifo(path := str(tmp_path / path))
    engine.say(LoadSlot(content_id("a"), path), Merge(content_id("a"), path)).run()
    kinds = {type(event) for event in engine.events if getattr(event, "content_id", "") == content_id("a")}
    assert kinds == {SlotFailed, MergeFailed}


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_a_checkpoint_written_over_changes_nothing_that_is_served(
    native: NativeOperations, tmp_path: Path, kind: str
) -> None:
    """As `cp` does it: into the very file."""
    operations: Operations = native if kind == "native" else ReferenceOperations()
    folder = save_tiny(tmp_path)
    model = LlamaModel(folder, operations, SlotStacks(ModelShape.of(folder), {4: 1}), 64)
    before = model.forward(BATCH)
    path = folder / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\1" * size)
    assert torch.equal(model.forward(BATCH), before)
    os.truncate(path, 0)
    assert torch.equal(model.forward(BATCH), before)
