"""The runner that computes: rows of a step to one batch, a forward pass, sampled ids back.

At start it compiles or finds the kernels, loads the base, and proves on the loaded weights that a row's bits do not
depend on its company or on how its prompt was cut; a machine that fails this is refused, since a re-driven request
could not go on as it began.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workers.engine.compiled import NoCompiler, Refused, isas
from workers.engine.formats import Allowed, Formats
from workers.engine.kv_blocks import BLOCK_TOKENS
from workers.engine.logits import adjust, adjusts, logprobs
from workers.engine.merging import PROBES, Weights, difference
from workers.engine.model import LlamaModel
from workers.engine.model_config import ModelConfig
from workers.engine.native import NativeOperations
from workers.engine.operations import Batch, Draws, Operations
from workers.engine.reference import ReferenceOperations
from workers.engine.runner import Fold, MergeRefused, Model, Opened, Stamps
from workers.engine.scheduler import Failure, Outcome, Row, Scored
from workers.engine.sequence import Sequence as Waiting
from workers.engine.slots import NO_ADAPTER, Lease
from workers.engine.stacks import SlotStacks
from workers.slot_image import ImageError, open_image

_LOG = logging.getLogger(__name__)
_SEED_MASK = (1 << 64) - 1
NEVER = -1e30  # of ids that a format leaves out: finite, for what is not finite is a fault


class NotReproducible(Exception):
    """A row's bits depend on its company on this machine."""


class TorchRunner:
    """`slots`: how many of each rank. Raises UnsupportedModel, NotReproducible."""

    def __init__(
        self, folder: Path, base_hash: str, operations: Operations, slots: Mapping[int, int], kv_tokens: int
    ) -> None:
        self._shape = ModelConfig.of(folder).shape
        self._ops = operations
        self.stacks = SlotStacks(self._shape, slots, operations.device)
        self.llama = LlamaModel(folder, operations, self.stacks, kv_tokens)
        self._weights = Weights(folder, self._shape, operations, self.llama.foldables)
        self._stamps = Stamps()
        self._formats = Formats(folder, self._shape.vocab)
        self._formats.load()
        self.model = Model(base_hash, self.llama.numeric_class, self._shape.context, self._shape.vocab)
        self._prove(kv_tokens)

    def open(self, content_id: str, path: Path) -> Opened:
        image = open_image(path, content_id, self._shape, *self.stacks.ranks)

        def copy(filling: Lease) -> int:
            self._stamps.erase(filling.slot)
            size = self.stacks.fill(filling.slot, image)
            self._stamps.write(filling)
            return size

        return Opened(self.stacks.ranks.index(image.rank), copy)

    def clear(self, slot: int) -> None:
        self._stamps.erase(slot)
        self.stacks.clear(slot)

    def merge(
        self, merged: Lease, filling: Lease, path: Path, blocks: Sequence[int], alive: Callable[[], None]
    ) -> Fold:
        image = open_image(path, merged.content_id, self._shape, *self.stacks.ranks)
        if not (self._stamps.holds(filling) and self._stamps.holds(NO_ADAPTER)):
            raise MergeRefused(f"slot {filling.slot} or the weights do not hold what they should")
        unmerged = self._probe(filling.slot, blocks, alive)
        self._stamps.erase(merged.slot)
        try:
            digest = self._weights.fold(image, alive)
        except ImageError:  # cut in the midst of it
            self.unmerge(alive)
            raise
        worst = difference(unmerged, self._probe(merged.slot, blocks, alive))
        if not worst <= (most := self._weights.tolerance):
            self.unmerge(alive)
            raise MergeRefused(f"merged logits differ by {worst:.2g} of the largest from unmerged ones, > {most}")
        self._stamps.write(merged)
        return Fold(f"{self.model.numeric_class}/merged-{merged.content_id[:16]}-{digest[:8]}", worst, most)

    def unmerge(self, alive: Callable[[], None]) -> None:
        self._stamps.erase(NO_ADAPTER.slot)
        self._weights.restore(alive)
        self._stamps.write(NO_ADAPTER)

    def _probe(self, slot: int, blocks: Sequence[int], alive: Callable[[], None]) -> Tensor:
        """Logits [probes, vocab] after each of the PROBES, as far as they fit, one after another."""
        most = min(len(blocks) * BLOCK_TOKENS, self._shape.context)
        logits = []
        for probe in PROBES:
            ids = [token % self._shape.vocab for token in probe[:most]]
            logits.append(self.llama.forward(tokens_batch([(ids, 0, list(blocks))], [slot])))
            alive()
        return torch.cat(logits)

    def ready(self, sequence: Waiting) -> bool:
        return self._formats.ready(sequence)

    def run(self, rows: Sequence[Row]) -> list[Outcome]:
        outcomes: list[Outcome] = [Failure(why) if (why := self._stamps.mismatch(row)) else None for row in rows]
        sound = [(at, row) for at, row in enumerate(rows) if outcomes[at] is None]
        if sound:
            logits = self.llama.forward(batch_of([row for _, row in sound]))
            sampled = [(at, row) for at, row in sound if row.samples]
            for (at, _), outcome in zip(sampled, self._sample(logits, [row for _, row in sampled]), strict=True):
                outcomes[at] = outcome
        return outcomes

    def _sample(self, logits: Tensor, rows: Sequence[Row]) -> list[Outcome]:
        """One outcome for each row of logits [m, vocab], which penalties and bias change in place."""
        if not rows:
            return []
        if any(adjusts(row.sequence.sampling) or row.sequence.sampling.top_logprobs is not None for row in rows):
            logits = logits.cpu()  # a device's are fetched only for what is computed here
        raw = {}
        for at, row in enumerate(rows):
            sequence = row.sequence
            if sequence.sampling.top_logprobs is not None:
                raw[at] = logits[at].numpy().copy()
            if adjusts(sequence.sampling):
                prompt, output = sequence.tokens[: sequence.prompt_length], sequence.tokens[sequence.prompt_length :]
                adjust(logits[at].numpy(), sequence.sampling, prompt, output)
        held = {
            at: self._formats.allowed(row.sequence) for at, row in enumerate(rows) if row.sequence.sampling.json_schema
        }
        if allowed := {at: ids for at, ids in held.items() if not isinstance(ids, Failure)}:
            _leave_out(logits, allowed)
        ids: list[int] = self._ops.sample(logits, _draws(rows)).tolist()
        for at, kept_ids in allowed.items():
            if ids[at] >= 0 and not kept_ids[ids[at]]:  # by a chance of 1 in 2^53: what is left out has some mass
                ids[at] = int(logits[at].argmax())
        outcomes: list[Outcome] = list(ids)
        for at, token in enumerate(ids):
            most = rows[at].sequence.sampling.top_logprobs
            if isinstance(failure := held.get(at), Failure):
                outcomes[at] = failure
            elif token < 0:
                outcomes[at] = Failure("a logit is not finite")
            elif most is not None:
                outcomes[at] = Scored(token, logprobs(raw[at], token, most))
        return outcomes

    def _prove(self, kv_tokens: int) -> None:
        """Every weight, several widths: the same prompt whole, in pieces, and among others gives the same bits."""
        length = min(24, self._shape.context, kv_tokens // BLOCK_TOKENS // 2 * BLOCK_TOKENS)
        ids = [(7 * i + 3) % self._shape.vocab for i in range(length)]
        blocks = list(range(-(-length // BLOCK_TOKENS)))
        others = [b + len(blocks) for b in blocks]
        whole = self.llama.forward(tokens_batch([(ids, 0, blocks)]))[0]
        for cut in (1, length // 2):
            self.llama.forward(tokens_batch([(ids[:cut], 0, blocks)]))
            among = self.llama.forward(tokens_batch([(ids[::-1], 0, others), (ids[cut:], cut, blocks)]))[1]
            if not torch.equal(whole, among):
                raise NotReproducible(f"{self.model.numeric_class}: a row's bits depend on its company here")


def operations(threads: int) -> Operations:
    """The GPU's where there is one, else the native ones, or torch's where the kernels cannot be compiled."""
    if torch.cuda.is_available():
        from workers.engine.triton_operations import TritonOperations  # Triton takes a second to import

        return TritonOperations(torch.device("cuda"))
    native = None
    for isa in isas():  # an older compiler may refuse the best one alone
        try:
            native = NativeOperations(threads, isa)
            break
        except NoCompiler as error:
            _LOG.warning("no native kernels for %s: %s", isa, error)
            if not isinstance(error, Refused):
                break
    if native is None:
        torch.set_num_threads(threads)
        _LOG.warning("torch computes instead, slower and in another numeric class")
        return ReferenceOperations()
    torch.set_num_threads(1)  # the kernels have threads of their own, and torch's would spin beside them
    _LOG.info("native kernels for %s, %d threads", isa, threads)
    return native


@torch.inference_mode()
def _leave_out(logits: Tensor, allowed: Mapping[int, Allowed]) -> None:
    """Only these rows are touched, wherever the logits are."""
    rows = torch.tensor(list(allowed), device=logits.device)
    kept = torch.from_numpy(np.stack(list(allowed.values()))).to(logits.device)
    logits[rows] = logits[rows].masked_fill(~kept, NEVER)


def _draws(rows: Sequence[Row]) -> Draws:
    asked = [row.sequence.sampling for row in rows]
    seeds = np.array([sampling.seed & _SEED_MASK for sampling in asked], np.uint64).view(np.int64)
    return Draws(
        seeds=torch.from_numpy(seeds),
        positions=torch.tensor([row.sequence.length for row in rows]),
        temperatures=torch.tensor([sampling.temperature for sampling in asked], dtype=torch.float32),
        top_ps=torch.tensor([sampling.top_p for sampling in asked], dtype=torch.float32),
        top_ks=torch.tensor([sampling.top_k for sampling in asked], dtype=torch.int32),
        min_ps=torch.tensor([sampling.min_p for sampling in asked], dtype=torch.float32),
    )


def batch_of(rows: Sequence[Row]) -> Batch:
    """The step's rows as one batch; a row's chunk may have many tokens."""
    parts = [(row.tokens, row.start, row.blocks) for row in rows]
    slots = [row.sequence.lease.slot for row in rows]
    return tokens_batch(parts, slots, [row.samples for row in rows])


def tokens_batch(
    parts: Sequence[tuple[list[int], int, list[int]]],
    slots: Sequence[int] | None = None,
    samples: Sequence[bool] | None = None,
) -> Batch:
    """parts: (token ids, position of the first, block numbers) of each sequence; by default base rows, all sampled."""
    counts = np.array([len(ids) for ids, _, _ in parts])
    starts = np.array([start for _, start, _ in parts])
    ends = np.cumsum(counts)
    tables = np.zeros((len(parts), max(len(blocks) for _, _, blocks in parts)), np.int32)
    for at, (_, _, blocks) in enumerate(parts):
        tables[at, : len(blocks)] = blocks
    of = np.repeat(np.arange(len(parts), dtype=np.int32), counts)
    positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    slot_of_part = np.array(slots if slots is not None else [0] * len(parts), np.int32)
    slot_of_row = slot_of_part[of]
    kept = ends - 1 if samples is None else (ends - 1)[np.array(samples, bool)]
    return Batch(
        ids=torch.from_numpy(np.array([token for ids, _, _ in parts for token in ids], np.int32)),
        positions=torch.from_numpy(positions.astype(np.int32)),
        slots=torch.from_numpy(slot_of_row),
        by_slot=torch.from_numpy(np.argsort(slot_of_row, kind="stable").astype(np.int32)),
        tables_of=torch.from_numpy(of),
        tables=torch.from_numpy(tables),
        last=torch.from_numpy(kept),
        adapted=bool(slot_of_part.any()),
    )
