"""What the publisher does while the Writer cannot, against a Writer in the test's hands: no broker fails on demand.

The real one, through a real outage, is in test_kills.py.
"""

import asyncio
from typing import Any, cast

import pytest

from schemas.codec import encode
from schemas.reasons import FinishReason, RejectReason, Tier
from schemas.tokens import Admitted, Finished, LoadReport, Logprobs, Rejected, TokenBatch, TokenEvent, Tokens
from streams.bus.errors import MaybeWritten, NotWritten
from streams.bus.reader import Headers
from streams.bus.writer import MAX_RECORD_BYTES, Writer, Written
from workers.publisher import AHEAD, MOST_DETAIL, MOST_HEADERS, MOST_IDS, Publisher
from workers.sequences import Say


class Hand:
    """Takes records; the test says what becomes of each."""

    def __init__(self) -> None:
        self.records: list[tuple[int, TokenBatch, asyncio.Future[Written]]] = []
        self.headers: list[list[tuple[str, bytes]]] = []
        self.full = False

    def send_nowait(
        self, topic: Any, value: TokenBatch, *, partition: int, headers: Headers
    ) -> asyncio.Future[Written]:
        if self.full:
            raise NotWritten("full")
        if len(encode(topic, value)) > MAX_RECORD_BYTES:
            raise ValueError("too large")
        future: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
        self.records.append((partition, value, future))
        self.headers.append(list(headers))
        return future

    async def settle(self, error: Exception | None = None) -> None:
        """All that is out is acknowledged, or fails."""
        for index, (partition, _, future) in enumerate(self.records):
            if not future.done() and error is None:
                future.set_result(Written(partition, index))
            elif not future.done():
                future.set_exception(error or Exception())
        for _ in range(3):
            await asyncio.sleep(0)

    def events(self, since: int = 0) -> list[TokenEvent]:
        return [event for _, batch, _ in self.records[since:] for event in batch.events]


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def publisher(hand: Hand) -> Publisher:
    load = LoadReport(1, 2, 3, 4)
    return Publisher(cast(Writer, hand), 0, 5, lambda: load, lambda gateway, _: gateway == 13)


def token(position: int, request: str = "r", gateway: int = 1) -> Say:
    return Say(gateway, 9, Tokens(request, 0, position, [100 + position]))


async def test_one_record_per_gateway_and_flush(hand: Hand, publisher: Publisher) -> None:
    publisher.add(Say(1, 9, Admitted("r", 0, Tier.NONE)))
    publisher.add(token(0))
    publisher.add(token(0, "s", gateway=2))
    publisher.flush()
    publisher.flush()
    assert [(p, b.gateway, b.gateway_incarnation, len(b.events)) for p, b, _ in hand.records] == [
        (1, 1, 9, 2),
        (2, 2, 9, 1),
    ]
    assert hand.records[0][1].load == LoadReport(1, 2, 3, 4)


async def test_what_cannot_go_out_grows_together_and_goes_in_order(hand: Hand, publisher: Publisher) -> None:
    for position in range(AHEAD + 50):
        publisher.add(token(position))
        publisher.flush()
    assert len(hand.records) == AHEAD
    await hand.settle()
    assert hand.events(AHEAD) == [Tokens("r", 0, AHEAD, [100 + n for n in range(AHEAD, AHEAD + 50)])]
    assert await asyncio.wait_for(publisher.drained(0), 1) is False
    await hand.settle()
    assert await publisher.drained(1)


async def test_a_full_writer_loses_nothing(hand: Hand, publisher: Publisher) -> None:
    hand.full = True
    publisher.add(token(0))
    publisher.flush()
    publisher.add(token(1))
    publisher.flush()
    hand.full = False
    publisher.flush()
    assert hand.events() == [Tokens("r", 0, 0, [100, 101])]


async def test_headers_go_with_their_record_or_the_next_ones(hand: Hand, publisher: Publisher) -> None:
    many = [(f"h{n}", b"x") for n in range(MOST_HEADERS + 3)]
    hand.full = True
    publisher.add(token(0), many)
    publisher.flush()
    hand.full = False
    publisher.flush()
    publisher.add(token(1))
    publisher.flush()
    publisher.add(token(2))
    publisher.flush()
    assert hand.headers == [many[:MOST_HEADERS], many[MOST_HEADERS:], []]


async def test_scores_grow_with_their_tokens(hand: Hand, publisher: Publisher) -> None:
    hand.full = True
    scores = [Logprobs(-1.0, [(7, -1.0)]), Logprobs(-2.0, [])]
    publisher.add(Say(1, 9, Tokens("r", 0, 0, [7], [scores[0]], cached=16)))
    publisher.add(Say(1, 9, Tokens("r", 0, 1, [8], [scores[1]])))
    hand.full = False
    publisher.flush()
    assert hand.events() == [Tokens("r", 0, 0, [7, 8], scores, 16)]


async def test_a_lost_record_leaves_a_gap_and_its_last_words_are_said_again(hand: Hand, publisher: Publisher) -> None:
    publisher.add(token(0))
    publisher.add(Say(1, 9, Finished("s", 0, 4, FinishReason.STOP)))
    publisher.add(Say(1, 9, Rejected("t", 0, RejectReason.STALE)))
    publisher.add(Say(13, 9, Rejected("ghost's", 0, RejectReason.STALE)))
    publisher.flush()
    publisher.add(token(1))
    publisher.flush()
    await hand.settle(MaybeWritten("who knows"))
    assert publisher.lost == 3
    assert hand.events(3) == [Finished("s", 0, 4, FinishReason.STOP), Rejected("t", 0, RejectReason.STALE)]
    publisher.add(token(2))
    publisher.flush()
    assert hand.events(4) == [Tokens("r", 0, 2, [102])]


async def test_many_small_events_go_out_in_records_that_fit(hand: Hand, publisher: Publisher) -> None:
    """Each of a few bytes, most of them its request's name."""
    names = [f"{n:032x}" for n in range(60_000)]
    for name in names:
        publisher.add(Say(1, 9, Rejected(name, 0, RejectReason.OVERLOADED, "64 open")))
    publisher.flush()
    assert [event.request_id for event in hand.events()] == names
    assert len(hand.records) == 4  # no more than it takes


async def test_a_long_output_goes_out_in_events_that_fit(hand: Hand, publisher: Publisher) -> None:
    """Of a sequence whose gateway could not be reached for all of its life."""
    hand.full = True
    for position in range(200_000):
        publisher.add(Say(1, 9, Tokens("r", 0, position, [4_000_000 + position])))
    hand.full = False
    publisher.flush()
    events = [event for event in hand.events() if isinstance(event, Tokens)]
    assert max(len(event.ids) for event in events) <= MOST_IDS
    assert [event.position for event in events] == list(range(0, 200_000, MOST_IDS))
    assert [i for event in events for i in event.ids] == list(range(4_000_000, 4_200_000))
    assert len(hand.records) == 2


async def test_an_error_told_at_length_is_told_all_the_same(hand: Hand, publisher: Publisher) -> None:
    publisher.add(Say(1, 9, Finished("r", 0, 4, FinishReason.ERROR, "why " * 500_000)))
    publisher.add(Say(1, 9, Rejected("s", 0, RejectReason.TOO_LONG, "why " * 500_000)))
    publisher.flush()
    told = [(event.request_id, len(event.detail)) for event in hand.events() if isinstance(event, Finished | Rejected)]
    assert told == [("r", MOST_DETAIL), ("s", MOST_DETAIL)]


async def test_a_replaced_worker_says_nothing_more(hand: Hand, publisher: Publisher) -> None:
    publisher.add(token(0))
    publisher.silence()
    publisher.flush()
    publisher.add(token(1))
    publisher.flush()
    assert hand.records == []
