"""The book of attempts: words in order, loads that miss nothing, rows that tell how long what took."""

from schemas.engine import SequenceFinished, Step, Token
from schemas.reasons import FinishReason, Tier
from schemas.requests import Sampling, Submit
from schemas.tokens import Admitted, Finished, Tokens
from workers.inbox import Admit, Stop
from workers.sequences import Sequences


def submit(request: str, attempt: int = 0, prompt: int = 10, count: int = 20, generated: int = 0) -> Submit:
    return Submit(
        request_id=request,
        attempt=attempt,
        customer="acme",
        adapter="acme/a@1",
        content_id="c" * 64,
        base_hash="",
        replica=0,
        incarnation=5,
        gateway=2,
        gateway_incarnation=9,
        prompt=list(range(prompt)),
        generated=list(range(generated)),
        max_tokens=count,
        sampling=Sampling(1),
        stop_ids=[],
        remaining_ms=1000,
    )


def step(number: int, running: int = 0, waiting: int = 0, tokens_in_flight: int = 0, **more: object) -> Step:
    fields = {"rows": running, "adapters": 1, "tokens": [], "finished": [], **more}
    return Step(step=number, running=running, waiting=waiting, tokens_in_flight=tokens_in_flight, **fields)  # type: ignore[arg-type]


def test_an_attempt_from_admission_to_its_row() -> None:
    book = Sequences(0, 5)
    start, say = book.admit(Admit(submit("r", generated=3), None, 99.0), Tier.DISK, 1.0)
    assert (say.gateway, say.gateway_incarnation, say.event) == (2, 9, Admitted("r", 0, Tier.DISK))
    assert (start.seq, start.generated) == (0, [0, 1, 2])
    book.loaded("c" * 64, 1.2)
    book.step(step(1, running=1, joined=[0]), 1.5)
    says, ended = book.step(step(2, running=1, tokens=[Token(0, 3, 77)]), 2.0)
    assert [s.event for s in says] == [Tokens("r", 0, 3, [77])]
    assert ended == []
    end = SequenceFinished(0, 5, FinishReason.STOP, "", 2, 6)
    says, [row] = book.step(step(3, tokens=[Token(0, 4, 78)], finished=[end]), 2.5)
    assert [s.event for s in says] == [Tokens("r", 0, 4, [78]), Finished("r", 0, 5, FinishReason.STOP)]
    assert (row.first_position, row.output_tokens, row.slot, row.epoch, row.incarnation) == (3, 2, 2, 6, 5)
    assert (row.load_ms, row.queue_ms, row.first_token_ms, row.total_ms) == (200, 300, 1000, 1500)
    assert len(book) == 0


def test_a_load_counts_what_the_engine_has_not_told_of() -> None:
    book = Sequences(0, 5)
    for n in range(3):
        book.admit(Admit(submit(f"r{n}"), None, 99.0), Tier.NONE, 1.0)
    load = book.load(17)
    assert (load.read_offset, load.running, load.waiting, load.tokens_in_flight) == (17, 0, 3, 90)
    book.step(step(1, running=1, waiting=1, tokens_in_flight=55), 1.1)  # it knew of two
    load = book.load(17)
    assert (load.running, load.waiting, load.tokens_in_flight) == (1, 2, 85)
    done = SequenceFinished(0, 1, FinishReason.LENGTH, "", 0, 0)
    book.step(step(2, running=2, tokens_in_flight=40, finished=[done]), 1.2)  # and now of all
    load = book.load(18)
    assert (load.running, load.waiting, load.tokens_in_flight) == (2, 0, 40)


def test_a_stop_names_the_sequence_of_that_very_attempt() -> None:
    book = Sequences(0, 5)
    book.admit(Admit(submit("r", attempt=0), None, 99.0), Tier.NONE, 1.0)
    book.admit(Admit(submit("r", attempt=1), None, 99.0), Tier.NONE, 1.0)
    cancel = book.stop(Stop("r", 1, FinishReason.DEADLINE))
    assert cancel is not None
    assert (cancel.seq, cancel.reason) == (1, FinishReason.DEADLINE)
    book.step(step(1, running=1, finished=[SequenceFinished(1, 0, FinishReason.DEADLINE, "", 0, 0)]), 1.1)
    assert book.stop(Stop("r", 1, FinishReason.CANCELLED)) is None
    assert book.stop(Stop("unknown", 0, FinishReason.CANCELLED)) is None


def test_what_a_dead_engine_leaves_is_a_row_each() -> None:
    book = Sequences(0, 5)
    book.admit(Admit(submit("a"), None, 99.0), Tier.NONE, 1.0)
    book.admit(Admit(submit("b"), None, 99.0), Tier.REMOTE, 1.0)
    book.step(step(1, running=2, tokens=[Token(0, 0, 7)]), 1.5)
    rows = {row.request_id: row for row in book.abandoned(2.0, FinishReason.ERROR)}
    assert (rows["a"].output_tokens, rows["b"].output_tokens) == (1, 0)
    assert (rows["a"].reason, rows["b"].load_ms, rows["b"].first_token_ms) == (FinishReason.ERROR, -1, -1)
    assert len(book) == 0


def test_steps_that_mix_adapters_are_counted() -> None:
    book = Sequences(0, 5)
    for number, adapters in enumerate([0, 1, 2, 5, 2]):
        book.step(step(number, adapters=adapters), 1.0)
    assert (book.steps, book.mixed_steps, book.max_adapters_in_step) == (4, 3, 5)
