"""A tiny random Llama in a Hugging Face folder, adapters of every kind for it, and an engine that runs in the test."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from schemas.engine import Command, Event, LoadSlot, SequenceFinished, StartSequence, Step
from schemas.requests import Sampling
from streams.adapters.shape import ModelShape
from workers.engine.engine import Engine
from workers.engine.runner import Fold, Runner
from workers.engine.scheduler import Limits, Scheduler
from workers.engine.sequence import Sequence
from workers.engine.slots import Slots
from workers.slot_image import Precision, write_image

MAX_RANK = 8
KV_TOKENS = 4096
Floats = npt.NDArray[np.float32]
Tensors = dict[tuple[int, str], tuple[Floats, Floats, float]]


def save_tiny(folder: Path, tied: bool = True) -> Path:
    """Three layers, six heads over two KV heads, weights large enough that tokens differ."""
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=331,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "base_hash.json").write_text(json.dumps({"base_hash": "5" * 64}))
    return folder


def content_id(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def adapter(shape: ModelShape, seed: int, rank: int = MAX_RANK, strength: float = 0.3) -> Tensors:
    """A strong random adapter: it changes nearly every token, so that any cross-talk shows."""
    random = np.random.default_rng(seed)

    def draw(*size: int) -> Floats:
        return (random.standard_normal(size) * strength).astype(np.float32)

    return {
        (layer, matrix): (draw(rank, k), draw(d, rank), 1.5)
        for layer in range(shape.layers)
        for matrix, (k, d) in shape.matrices().items()
    }


def rounded(tensors: Tensors, precision: Precision) -> Tensors:
    """The nearest adapter that `precision` keeps, with values that only its smallest steps express."""
    dtype = {Precision.F32: torch.float32, Precision.BF16: torch.bfloat16, Precision.F16: torch.float16}[precision]

    def near(values: Floats) -> Floats:
        values[0, :5] = (-0.0, 6e-8, 1e-5, -3e-5, 6e4)  # among them halves too small to be normal
        found: Floats = torch.from_numpy(values).to(dtype).float().numpy()
        return found

    return {place: (near(a), near(b), scale) for place, (a, b, scale) in tensors.items()}


def image(folder: Path, shape: ModelShape, name: str, tensors: Tensors, max_rank: int = MAX_RANK) -> LoadSlot:
    """Writes the image of adapter `name` and gives the command that loads it."""
    path = folder / name
    write_image(path, shape, max_rank, content_id(name), tensors)
    return LoadSlot(content_id(name), str(path))


def start(
    seq: int,
    prompt: list[int],
    adapter: str = "",
    max_tokens: int = 12,
    generated: Iterable[int] = (),
    sampling: Sampling | None = None,
    stop_ids: Iterable[int] = (),
) -> StartSequence:
    return StartSequence(
        seq=seq,
        customer="c",
        content_id=content_id(adapter) if adapter else "",
        prompt=prompt,
        generated=list(generated),
        max_tokens=max_tokens,
        sampling=sampling or Sampling(seed=seq),
        stop_ids=list(stop_ids),
    )


class NeverMerged:
    """Half a runner, for those that are only asked for steps."""

    def ready(self, _: Sequence) -> bool:
        return True

    def merge(self, *_: object) -> Fold:
        raise AssertionError("nobody merges here")

    def unmerge(self, *_: object) -> None:
        raise AssertionError("nobody merges here")


class InProcess:
    """The engine without its process: commands in, events out, steps by hand."""

    def __init__(
        self, runner: Runner, slots: int | list[int], kv_tokens: int = KV_TOKENS, prompt_tokens: int = 128
    ) -> None:
        """`slots`: those of the only pool, or of each."""
        self.events: list[Event] = []
        self.slots = Slots(*(slots if isinstance(slots, list) else [slots]))
        model = runner.model
        limits = Limits(model.vocab_size, model.context_length, kv_tokens, prompt_tokens_per_step=prompt_tokens)
        self.scheduler = Scheduler(limits, self.slots)
        self.engine = Engine(self.scheduler, self.slots, runner, self.events.append, lambda: 0.0)

    def say(self, *commands: Command) -> "InProcess":
        for command in commands:
            self.engine.handle(command)
        return self

    def run(self) -> "InProcess":
        """Steps until nothing is left to compute."""
        while self.engine.step() or self.engine.preparing:
            pass
        return self

    def steps(self) -> list[Step]:
        return [event for event in self.events if isinstance(event, Step)]

    def tokens(self, seq: int) -> list[int]:
        """The sequence's tokens in order; asserts that positions have no gap and no repeat."""
        own = [token for step in self.steps() for token in step.tokens if token.seq == seq]
        assert [token.position for token in own] == list(range(own[0].position, own[0].position + len(own)))
        return [token.id for token in own]

    def finished(self, seq: int) -> SequenceFinished:
        (only,) = [ended for step in self.steps() for ended in step.finished if ended.seq == seq]
        return only
