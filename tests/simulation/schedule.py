"""What a seed stands for: requests, faults, and how rough the log is. Made before anything runs.

Profiles keep faults apart, so that each rule meets schedules in which nothing else could save it. In peaceful ones no
replica fails, and so no request may ever begin anew.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

Fault = tuple[Any, ...]  # when, the name of a method of World, its arguments


@dataclass
class Chances:
    """How rough it is. Probabilities are per record; seconds are bounds."""

    slow_write: float = 0.0
    twice: float = 0.0
    lost: float = 0.0
    given_up: float = 0.0
    lag_s: float = 0.05
    late_adapters_s: float = 0.0
    reconnect_s: float = 1.0
    worker_limit: int = 64
    capacity_tokens: int = 100_000

    @property
    def tight(self) -> bool:
        """Whether a healthy fleet may be full."""
        return self.worker_limit < 10 or self.capacity_tokens < 1000


@dataclass
class Schedule:
    """`quiet_at`: the end of the last fault. `heals_s`: after that, until every place must be held and serve."""

    seed: int
    profile: str
    workers: int = 2
    gateways: int = 2
    chances: Chances = field(default_factory=Chances)
    outages: list[tuple[float, float]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    quiet_at: float = 4.0
    heals_s: float = 1.0
    peaceful: bool = False
    lossy: bool = False  # Cancels may be lost, too
    slow: bool = False  # deadlines may pass though nothing fails

    def fault(self, when: float, name: str, *args: Any, lasts_s: float = 0.0, heals_s: float = 1.0) -> None:
        self.faults.append((when, name, *args))
        self.quiet_at = max(self.quiet_at, when + lasts_s)
        self.heals_s = max(self.heals_s, heals_s)


AFTER_SILENCE_S = 10.5  # 3 s of grace, 5 s of silence, and what a start takes
AFTER_TAKE_OVER_S = 3.5
RUSH_S = 1.6  # when the first requests come: by then the fleet has started


def schedule(seed: int) -> Schedule:
    """The seed's schedule."""
    rng = random.Random(seed * 2 + 1)
    profile = rng.choice(PROFILES)
    made = Schedule(seed, profile.__name__.strip("_"))
    made.workers = 3 if rng.random() < 0.2 else 2
    for kind, count in (("worker", made.workers), ("gateway", made.gateways)):
        for place in range(count):
            made.faults.append((0.2 * rng.random(), "spawn", kind, place, False))
    _requests(made, rng)
    profile(made, rng)
    return made


def _requests(made: Schedule, rng: random.Random) -> None:
    for number in range(rng.randint(2, 5)):
        long = rng.random() < 0.15
        request: dict[str, Any] = {
            "request_id": f"r{number}",
            "place": rng.randrange(made.gateways),
            "model": rng.choice(("a", "a", "b", "")),
            "prompt": rng.randrange(1, 500),
            "max_tokens": 300 if long else rng.randint(1, 40),
            "deadline_s": 6.0 + 20.0 * rng.random() if rng.random() < 0.9 else 0.3 + 2.0 * rng.random(),
            "opens_at": RUSH_S + 3.0 * rng.random(),
        }
        if rng.random() < 0.2:
            request["vanishes_after_s"] = 3.0 * rng.random() ** 2
        elif rng.random() < 0.1:
            request["stops_after"] = rng.randint(1, 6)
        made.requests.append(request)


def _calm(made: Schedule, rng: random.Random) -> None:
    """Nothing fails; some are slow, full, or learn late of adapters. Adapters retire, gateways are killed."""
    made.peaceful = made.slow = True
    chances = made.chances
    chances.lag_s = 0.4 * rng.random()
    chances.late_adapters_s = rng.choice((0.0, 0.4, 0.6))
    chances.worker_limit = rng.choice((1, 2, 64, 64))
    chances.capacity_tokens = rng.choice((60, 400, 100_000))
    if rng.random() < 0.5:
        made.fault(RUSH_S + 3.0 * rng.random(), "retire", lasts_s=1.0)
    if rng.random() < 0.3:
        place = rng.randrange(made.gateways)
        made.fault(RUSH_S + 3.0 * rng.random(), "kill", "gateway", place, None, True, heals_s=AFTER_SILENCE_S)
    if rng.random() < 0.3:  # a latecomer
        made.faults = [f for f in made.faults if f[1:4] != ("spawn", "worker", 1)]
        made.fault(RUSH_S + 3.0 * rng.random(), "spawn", "worker", 1, False, heals_s=AFTER_TAKE_OVER_S)


def _echo(made: Schedule, rng: random.Random) -> None:
    """Records come twice, late and again."""
    made.peaceful = made.slow = True
    made.chances.twice = 0.3
    made.chances.slow_write = 0.2
    for _ in range(rng.randint(0, 4)):
        kind = rng.choice(("worker", "gateway"))
        made.fault(RUSH_S + 4.0 * rng.random(), "rewind", kind, rng.randrange(2), rng.randint(1, 12))


def _outage(made: Schedule, rng: random.Random) -> None:
    """The broker goes away, and comes back; readers find it before writers do."""
    made.peaceful = made.slow = True
    made.chances.reconnect_s = 4.0
    began = RUSH_S + 3.0 * rng.random()
    made.outages.append((began, began + 7.0 * rng.random()))
    if rng.random() < 0.3:
        began = made.outages[0][1] + 5.0 + 2.0 * rng.random()
        made.outages.append((began, began + 1.5 * rng.random()))
    made.quiet_at = made.outages[-1][1] + made.chances.reconnect_s
    made.heals_s = 2.0


def _kills(made: Schedule, rng: random.Random) -> None:
    """Where the survivors have room for few, what ran waits until somebody is back."""
    made.chances.worker_limit = rng.choice((1, 2, 64, 64))
    for _ in range(rng.randint(1, 2)):
        _kill(made, rng, "worker")
    if rng.random() < 0.3:
        _kill(made, rng, "gateway")


def _kill(made: Schedule, rng: random.Random, kind: str) -> None:
    when, place = RUSH_S + 4.0 * rng.random(), rng.randrange(made.workers if kind == "worker" else made.gateways)
    how = rng.random()
    restart_s = 0.2 + 2.0 * rng.random()
    if kind == "gateway" or how < 0.5:
        take_over = rng.random() < 0.7
        heals_s = AFTER_TAKE_OVER_S if take_over else AFTER_SILENCE_S
        made.fault(when, "kill", kind, place, restart_s, take_over, lasts_s=restart_s, heals_s=heals_s)
    elif how < 0.7:
        made.fault(when, "crash", place, restart_s, lasts_s=restart_s, heals_s=AFTER_TAKE_OVER_S)
    elif how < 0.9:
        seconds = 8.0 * rng.random()
        made.fault(when, "hang", place, seconds, lasts_s=seconds, heals_s=2.0)
    else:
        made.fault(when, "drain", place, heals_s=AFTER_TAKE_OVER_S + 10.0)


def _zombies(made: Schedule, rng: random.Random) -> None:
    """Someone is paused, replaced meanwhile or not, and goes on as if nothing had been."""
    for _ in range(rng.randint(1, 2)):
        _zombie(made, rng, "worker" if rng.random() < 0.75 else "gateway")


def _zombie(made: Schedule, rng: random.Random, kind: str) -> None:
    when, place = RUSH_S + 3.0 * rng.random(), rng.randrange(made.workers if kind == "worker" else made.gateways)
    seconds = 7.0 * rng.random()
    made.fault(when, "pause", kind, place, seconds, lasts_s=seconds, heals_s=3.0)
    if rng.random() < 0.7:
        take_over = rng.random() < 0.7
        begins = when + seconds * (0.8 * rng.random() - 0.1)  # at times before the pause: the two overlap
        heals_s = AFTER_TAKE_OVER_S if take_over else AFTER_SILENCE_S
        made.fault(begins, "spawn", kind, place, take_over, lasts_s=1.0, heals_s=heals_s)


def _lossy(made: Schedule, rng: random.Random) -> None:
    """Acknowledged records vanish, batches are given up, a gateway's place falls out of the log's range."""
    made.chances.lost = rng.choice((0.0, 0.01, 0.05))
    made.lossy = made.chances.lost > 0
    made.chances.given_up = rng.choice((0.0, 0.03, 0.15))
    if rng.random() < 0.4:
        made.fault(RUSH_S + 4.0 * rng.random(), "lose_place", rng.randrange(made.gateways))


def _storm(made: Schedule, rng: random.Random) -> None:
    """Everything at once."""
    chances = made.chances
    chances.slow_write, chances.twice = rng.choice((0.0, 0.1)), rng.choice((0.0, 0.1))
    chances.lag_s = rng.choice((0.05, 0.5))
    chances.late_adapters_s = rng.choice((0.0, 1.5))
    chances.capacity_tokens = rng.choice((60, 100_000))
    if rng.random() < 0.5:
        _lossy(made, rng)
    for _ in range(rng.randint(1, 2)):
        rng.choice((_zombie, _kill))(made, rng, rng.choice(("worker", "worker", "gateway")))
    for _ in range(rng.randint(0, 2)):
        seconds = 5.0 * rng.random()
        who = (rng.choice(("worker", "gateway")), rng.randrange(2), rng.random() < 0.5)
        made.fault(RUSH_S + 3.0 * rng.random(), "deafen", *who, seconds, lasts_s=seconds, heals_s=3.0)
    if rng.random() < 0.3:
        made.fault(RUSH_S + 3.0 * rng.random(), "retire", lasts_s=1.0)
    if rng.random() < 0.3:
        began = RUSH_S + 4.0 * rng.random()
        made.outages.append((began, began + 4.0 * rng.random()))
        made.quiet_at = max(made.quiet_at, made.outages[0][1] + chances.reconnect_s)
        made.heals_s = AFTER_SILENCE_S
    if any(fault[1] in ("kill", "crash", "spawn") for fault in made.faults):
        made.heals_s = max(made.heals_s, AFTER_TAKE_OVER_S)


# As often as they are listed.
PROFILES = (
    *(_calm, _calm, _echo, _outage, _outage),
    *(_kills, _kills, _kills, _zombies, _zombies, _zombies),
    *(_lossy, _storm, _storm),
)
