"""The attempts that run in the engine: which sequence is whose, how far it is, and what its gateway is told. Pure.

Owns the numbering of sequences. Ordering relied on: the engine takes StartSequence in the order of their numbers and
ends each with exactly one SequenceFinished, so that `running + waiting + ended` of a Step says how many starts it
knew of; what it did not know yet is added to the load that it reports. A crash loses all of this with the engine.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from schemas.adapters import AdapterRecord
from schemas.engine import CancelSequence, SequenceFinished, StartSequence, Step
from schemas.reasons import FinishReason, Tier
from schemas.requests import Submit
from schemas.stats import AttemptFinished
from schemas.tokens import Admitted, Finished, LoadReport, TokenEvent, Tokens
from workers.inbox import Admit, Stop


@dataclass
class Attempt:
    """One admitted attempt. Times are monotonic seconds, None while not reached; `length` is the output's so far."""

    seq: int
    submit: Submit
    adapter: AdapterRecord | None
    tier: Tier
    admitted_at: float
    length: int
    loaded_at: float | None = None
    joined_at: float | None = None
    first_token_at: float | None = None


@dataclass(frozen=True)
class Say:
    """An event for one incarnation of one gateway."""

    gateway: int
    gateway_incarnation: int
    event: TokenEvent


class Sequences:
    """All attempts in the engine, by sequence number and by request."""

    def __init__(self, replica: int, incarnation: int) -> None:
        self._replica, self._incarnation = replica, incarnation
        self._by_seq: dict[int, Attempt] = {}
        self._seq_of: dict[tuple[str, int], int] = {}
        self._started = 0
        self._ended = 0
        self._untold: deque[tuple[int, int]] = deque()  # sequences the engine has not told of, and their cost in tokens
        self._running = self._waiting = self._tokens = 0  # by the engine's last step
        self.steps = 0  # the engine's last completed one
        self.mixed_steps = 0
        self.max_adapters_in_step = 0

    def __len__(self) -> int:
        return len(self._by_seq)

    def contents(self) -> dict[int, str]:
        """Sequence -> the content that it is to run with, empty for the base."""
        return {seq: attempt.submit.content_id for seq, attempt in self._by_seq.items()}

    def users(self, content_id: str) -> int:
        """Attempts that run with this content or wait for it."""
        return sum(attempt.submit.content_id == content_id for attempt in self._by_seq.values())

    def admit(self, admit: Admit, tier: Tier, now: float) -> tuple[StartSequence, Say]:
        """Gives the attempt its sequence: the engine's command, and the word to its gateway."""
        submit, seq = admit.submit, self._started
        attempt = Attempt(seq, submit, admit.adapter, tier, now, len(submit.generated))
        if tier is Tier.GPU:
            attempt.loaded_at = now
        self._started += 1
        self._by_seq[seq] = attempt
        self._seq_of[submit.request_id, submit.attempt] = seq
        self._untold.append((seq, len(submit.prompt) + submit.max_tokens))
        start = StartSequence(
            seq=seq,
            customer=submit.customer,
            content_id=submit.content_id,
            prompt=submit.prompt,
            generated=submit.generated,
            max_tokens=submit.max_tokens,
            sampling=submit.sampling,
            stop_ids=submit.stop_ids,
        )
        return start, _say(submit, Admitted(submit.request_id, submit.attempt, tier))

    def stop(self, stop: Stop) -> CancelSequence | None:
        """The engine's command; its SequenceFinished answers it. None if the attempt has ended."""
        seq = self._seq_of.get((stop.request_id, stop.attempt))
        return None if seq is None else CancelSequence(seq, stop.reason)

    def loaded(self, content_id: str, now: float) -> None:
        """The adapter that these attempts wait for is in its slot."""
        for attempt in self._by_seq.values():
            if attempt.submit.content_id == content_id and attempt.loaded_at is None:
                attempt.loaded_at = now

    def step(self, step: Step, now: float) -> tuple[list[Say], list[AttemptFinished]]:
        """What a step or tick brought: words to gateways, each sequence's in order, and the attempts that ended.

        `at_unix_ms` of the rows is left at 0.
        """
        says: list[Say] = []
        ended: list[AttemptFinished] = []
        for seq in step.joined:
            if (attempt := self._by_seq.get(seq)) is not None and attempt.joined_at is None:
                attempt.joined_at = now
        for token in step.tokens:
            attempt = self._by_seq[token.seq]
            submit = attempt.submit
            scores = [] if token.logprobs is None else [token.logprobs]
            cached = step.cached.get(token.seq, 0)
            says.append(
                _say(submit, Tokens(submit.request_id, submit.attempt, token.position, [token.id], scores, cached))
            )
            attempt.length = token.position + 1
            attempt.first_token_at = attempt.first_token_at if attempt.first_token_at is not None else now
        for finished in step.finished:
            attempt = self._forget(finished.seq)
            submit, word = attempt.submit, finished
            attempt.length = word.length
            says.append(
                _say(submit, Finished(submit.request_id, submit.attempt, word.length, word.reason, word.detail))
            )
            ended.append(self._row(attempt, word, now))
        self._told(step)
        return says, ended

    def abandoned(self, now: float, reason: FinishReason) -> Iterator[AttemptFinished]:
        """What runs will never end: one row each. Their gateways are told nothing, and re-drive them."""
        for seq in list(self._by_seq):
            attempt = self._forget(seq)
            yield self._row(attempt, SequenceFinished(seq, attempt.length, reason, "", 0, 0), now)

    def load(self, read_offset: int) -> LoadReport:
        """The engine's own count, and what it has not told of yet."""
        return LoadReport(
            read_offset=read_offset,
            running=self._running,
            waiting=self._waiting + len(self._untold),
            tokens_in_flight=self._tokens + sum(cost for _, cost in self._untold),
        )

    def _told(self, step: Step) -> None:
        self.steps = step.step
        self._running, self._waiting, self._tokens = step.running, step.waiting, step.tokens_in_flight
        known = step.running + step.waiting + self._ended
        while self._untold and self._untold[0][0] < known:
            self._untold.popleft()
        self.mixed_steps += step.adapters >= 2
        self.max_adapters_in_step = max(self.max_adapters_in_step, step.adapters)

    def _forget(self, seq: int) -> Attempt:
        attempt = self._by_seq.pop(seq)
        self._ended += 1
        del self._seq_of[attempt.submit.request_id, attempt.submit.attempt]
        return attempt

    def _row(self, attempt: Attempt, word: SequenceFinished, now: float) -> AttemptFinished:
        submit = attempt.submit
        began = attempt.admitted_at
        ready = began if attempt.tier is Tier.NONE else attempt.loaded_at
        return AttemptFinished(
            request_id=submit.request_id,
            attempt=submit.attempt,
            at_unix_ms=0,
            customer=submit.customer,
            adapter=submit.adapter,
            content_id=submit.content_id,
            slot=word.slot,
            epoch=word.epoch,
            tier=attempt.tier,
            reason=word.reason,
            gateway=submit.gateway,
            gateway_incarnation=submit.gateway_incarnation,
            replica=self._replica,
            incarnation=self._incarnation,
            prompt_tokens=len(submit.prompt),
            first_position=len(submit.generated),
            output_tokens=word.length - len(submit.generated),
            queue_ms=_ms(ready, attempt.joined_at),
            load_ms=_ms(began, ready),
            first_token_ms=_ms(began, attempt.first_token_at),
            total_ms=_ms(began, now),
        )


def _say(submit: Submit, event: TokenEvent) -> Say:
    return Say(submit.gateway, submit.gateway_incarnation, event)


def _ms(since: float | None, until: float | None) -> float:
    return -1.0 if since is None or until is None else round(max(0.0, until - since) * 1000, 3)
