"""The worker's words with its engine process, msgpack in length-prefixed frames over a local stream socket.

The worker speaks Commands, the engine answers with Events. The engine owns slots, leases and eviction; the worker owns
remote, disk and RAM. A sequence whose adapter is in no slot waits in the engine, which asks once with Missing; the
worker answers with LoadSlot (an image in shared memory, see workers/slot_image.py) or FailAdapter.
Frame: 4 bytes little-endian length, then the msgpack body.
"""

import msgspec

from schemas.reasons import FinishReason
from schemas.requests import Sampling
from schemas.tokens import Logprobs


class StartSequence(msgspec.Struct, frozen=True, tag="start", omit_defaults=True):
    """`seq` is the worker's own number, never used twice in an engine's life. content_id empty: the base model.

    Output goes on at position len(generated); `max_tokens` bounds the whole output, `generated` included. `weight` is
    the customer's share of a busy engine beside other customers' shares.
    """

    seq: int
    customer: str
    content_id: str
    prompt: list[int]
    generated: list[int]
    max_tokens: int
    sampling: Sampling
    stop_ids: list[int]
    weight: float = 1.0


class CancelSequence(msgspec.Struct, frozen=True, tag="cancel"):
    """Answered by SequenceFinished with `reason`, unless the sequence had ended already."""

    seq: int
    reason: FinishReason


class LoadSlot(msgspec.Struct, frozen=True, tag="load"):
    """Fill a slot from the image at `path` (a file in shared memory), evicting the least recently used idle one.

    Waits inside the engine while every slot is in use. Answered by SlotLoaded or SlotFailed.
    """

    content_id: str
    path: str


class UnloadSlot(msgspec.Struct, frozen=True, tag="unload"):
    """Answered by SlotEvicted, or SlotFailed with reason "in use"."""

    content_id: str


class FailAdapter(msgspec.Struct, frozen=True, tag="fail"):
    """The adapter cannot be had: every sequence that waits for it ends with LOAD_FAILED and `detail`."""

    content_id: str
    detail: str


class Merge(msgspec.Struct, frozen=True, tag="merge"):
    """Fold an adapter into the base's weights, from the image at `path`: this content alone is served until Unmerge.

    Only while no sequence runs or waits: the worker drains first. Takes a slot as LoadSlot does, with the same events,
    to check the merged logits against. Answered by Merged or MergeFailed.
    """

    content_id: str
    path: str


class Unmerge(msgspec.Struct, frozen=True, tag="unmerge"):
    """Restore the base's weights to the bit; while no sequence runs or waits. Answered by Unmerged or MergeFailed."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


Command = StartSequence | CancelSequence | LoadSlot | UnloadSlot | FailAdapter | Merge | Unmerge | Shutdown


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The base is loaded. `numeric_class` names everything that decides a logit's bits besides the weights."""

    base_hash: str
    numeric_class: str
    context_length: int
    vocab_size: int
    slots: int  # usable by adapters; the base's slot 0 not counted
    max_rank: int
    kv_tokens: int
    max_rows: int


class Token(msgspec.Struct, frozen=True, tag="k", array_like=True):
    """`id` stands at output position `position`. A stop token is output like any other, as the last."""

    seq: int
    position: int
    id: int
    logprobs: Logprobs | None = None


class SequenceFinished(msgspec.Struct, frozen=True, tag="f", array_like=True):
    """`length`: the whole output's. slot, epoch: where its adapter was; 0, 0 for the base or if never scheduled, 0
    and the merge's epoch if merged.

    `cached` of its prompt tokens were not computed for it: their keys and values stood in the prefix cache.
    """

    seq: int
    length: int
    reason: FinishReason
    detail: str
    slot: int
    epoch: int
    cached: int = 0


class Step(msgspec.Struct, frozen=True, tag="step"):
    """One engine step, or an idle tick (no rows; at least every 0.5 s), which is the engine's proof of life.

    `step` counts both. `adapters` is the number of different adapters among the rows. `tokens_in_flight`: prompt
    tokens not yet read plus output tokens still allowed, over all unfinished sequences. `joined`: sequences that got
    their place in the batch since the last step. `cached`: for sequences whose first token this is, how many tokens
    of the prompt stood in the prefix cache, where any did.
    """

    step: int
    rows: int
    adapters: int
    running: int
    waiting: int
    tokens_in_flight: int
    tokens: list[Token]
    finished: list[SequenceFinished]
    joined: list[int] = []
    cached: dict[int, int] = {}


class Missing(msgspec.Struct, frozen=True, tag="missing"):
    """A sequence waits for this content and nothing is on its way. Said once per content until it is answered."""

    content_id: str


class SlotLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    content_id: str
    slot: int
    epoch: int
    bytes: int
    duration_ms: float


class SlotEvicted(msgspec.Struct, frozen=True, tag="evicted"):
    content_id: str
    slot: int


class SlotFailed(msgspec.Struct, frozen=True, tag="failed"):
    content_id: str
    reason: str


class Leases(msgspec.Struct, frozen=True, tag="leases"):
    """Every few seconds, behind a Step and as of it. `held`: sequence -> the content that it has a lease on.

    `running`: the sequences in the batch that run with an adapter. `blocks`: KV blocks that sequences hold.
    """

    held: dict[int, str]
    running: list[int]
    blocks: int = 0


class Merged(msgspec.Struct, frozen=True, tag="merged"):
    """The content is folded into the weights. `numeric_class` takes the place of Ready's until Unmerged.

    `worst` is the largest difference to the unmerged logits on the probe prompts, in parts of the largest of those
    logits; at most `tolerance`. A re-driven output goes on to the bit only in an engine of the same class.
    """

    content_id: str
    epoch: int
    numeric_class: str
    worst: float
    tolerance: float
    duration_ms: float


class Unmerged(msgspec.Struct, frozen=True, tag="unmerged"):
    """The weights are the base's, to the bit. `content_id`: what was merged, empty if nothing was."""

    content_id: str
    numeric_class: str
    duration_ms: float


class MergeFailed(msgspec.Struct, frozen=True, tag="merge_failed"):
    """Merge or Unmerge was refused and changed nothing. `content_id`: what was to be merged, or still is."""

    content_id: str
    reason: str


Event = Ready | Step | Missing | SlotLoaded | SlotEvicted | SlotFailed | Leases | Merged | Unmerged | MergeFailed
