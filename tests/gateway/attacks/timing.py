"""Whether the time of a refusal tells what it hides: many pairs of requests in turn, and the difference of their times.

For people, not for a test: times on a shared machine prove nothing in one run.
"""

import http.client
import json
import time

import numpy as np

from tests.gateway.attacks.target import CHATS, MALLORY, VICTIM, Target

PAIRS, WARM = 3_000, 200


def measured(target: Target) -> list[str]:
    """Blocks. A row for each pair."""
    hidden, absent = (target.chat(model=f"victim/{name}:prod") for name in ("secret", "sacred"))
    return [
        _row(target, "another customer's alias / one that is not there", (MALLORY, hidden), (MALLORY, absent)),
        _row(
            target,
            "a key that begins as a valid one does / one that does not",
            (VICTIM[:-1] + "~", hidden),
            ("~" * len(VICTIM), hidden),
        ),
    ]


def _row(target: Target, what: str, *pair: tuple[str, dict[str, object]]) -> str:
    connection = http.client.HTTPConnection(target.door.url.removeprefix("http://"))
    times: list[list[float]] = [[], []]
    for turn in range(WARM + PAIRS):
        for which in (turn % 2, 1 - turn % 2):  # so that neither is always the first
            key, body = pair[which]
            took_us = _asked(connection, key, json.dumps(body))
            if turn >= WARM:
                times[which].append(took_us)
    connection.close()
    one, other = (np.array(of) for of in times)
    random = np.random.default_rng(1)
    picks = random.integers(0, PAIRS, (1_000, PAIRS))
    spread = np.median(one[picks] - other[picks], axis=1)
    low, high = np.percentile(spread, (2.5, 97.5))
    word = "held" if low <= 0 <= high else "LOOK AT IT"  # one run in twenty says so where there is nothing
    return (
        f"| timing | {what} | {np.median(one):.0f} / {np.median(other):.0f} us; the difference within a pair: "
        f"{np.median(one - other):+.1f} us [{low:+.1f}, {high:+.1f}] of {PAIRS} pairs | {word} |"
    )


def _asked(connection: http.client.HTTPConnection, key: str, body: str) -> float:
    began = time.perf_counter()
    connection.request("POST", CHATS, body, {"Authorization": f"Bearer {key}", "Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    assert answer.status in (401, 404), answer.status
    return (time.perf_counter() - began) * 1e6
