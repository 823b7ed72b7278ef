"""Ten thousand random schedules through the modules of production; a seed that breaks an invariant prints its trace.

Replay one with `python -m tests.simulation SEED`.
"""

from collections import Counter

import pytest

from tests.simulation.schedule import schedule
from tests.simulation.world import World

SCHEDULES = 10_000
TRACE_LINES = 120

# What must have happened in some schedules, or they prove nothing.
FAULTS = (
    "redrives",
    "further attempts",
    "gaps",
    "zombie turns",
    "zombie words dropped",
    "replaced processes",
    "dead replicas buried",
    "buried alive",
    "replaced, by a request",
    "stale rejections",
    "stale rejections heard",
    "kills of a worker",
    "kills of a gateway",
    "engine crashes",
    "engine hangs",
    "drains",
    "pauses",
    "outages",
    "records lost",
    "records twice",
    "batches given up",
    "submits in doubt",
    "late adapters waited for",
    "aliases resolved anew",
    "rows stopped: cancelled",
    "rows stopped: deadline",
    "rows stopped: gateway_lost",
    "ended ok: length",
    "ended ok: stop",
    "ended cancelled: cancelled",
    "ended deadline: deadline",
    "ended overloaded: overloaded",
    "ended unavailable: broker",
    "ended failed: redrives_used_up",
)


@pytest.mark.timeout(600)  # 50 s on a core of its own
def test_ten_thousand_schedules() -> None:
    happened: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        try:
            happened.update(World(schedule(seed)).run().keys())
        except (AssertionError, LookupError) as error:
            raise AssertionError(f"seed {seed}: {error!r}\n{_story(seed)}") from error
    print(*(f"{schedules:6d} {what}" for what, schedules in sorted(happened.items())), sep="\n")
    assert [fault for fault in FAULTS if not happened[fault]] == []


def test_a_seed_is_one_story() -> None:
    for seed in range(30):
        first, second = World(schedule(seed), tracing=True), World(schedule(seed), tracing=True)
        assert first.run() == second.run()
        assert first.lines == second.lines
        untraced = World(schedule(seed))
        assert untraced.run() == first.counts


def _story(seed: int) -> str:
    """The end of the seed's trace."""
    world = World(schedule(seed), tracing=True)
    try:
        world.run()
    except (AssertionError, LookupError):
        return "\n".join(line[:240] for line in world.lines[-TRACE_LINES:])
    return "it does not fail when it is run again"
