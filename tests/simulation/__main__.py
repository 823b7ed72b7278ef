"""`python -m tests.simulation SEED` replays one schedule and prints what happened; two numbers run a range."""

import sys
import time
from collections import Counter

from tests.simulation.schedule import schedule
from tests.simulation.world import Broken, World


def replay(seed: int) -> int:
    """Prints the schedule's whole trace, and what was wrong."""
    planned = schedule(seed)
    print(planned)
    world = World(planned, tracing=True)
    try:
        world.run()
    except (Broken, AssertionError, LookupError) as error:
        print("\n".join(world.lines))
        print(f"seed {seed}, {planned.profile}, at {world.now:.3f} s: {type(error).__name__}: {error}")
        return 1
    print("\n".join(world.lines))
    print(f"seed {seed}, {planned.profile}: as it should be;", dict(world.counts))
    return 0


def run(first: int, last: int) -> int:
    """Runs a range of seeds; prints the first failures and the counts."""
    began, counts, wrong = time.process_time(), Counter[str](), 0
    for seed in range(first, last):
        world = World(schedule(seed))
        try:
            counts.update(world.run().keys())
        except (Broken, AssertionError, LookupError) as error:
            wrong += 1
            if wrong <= 20:
                print(
                    f"seed {seed}, {world.schedule.profile}, at {world.now:.2f} s: {type(error).__name__}: {error}"[
                        :300
                    ]
                )
    for what, schedules in sorted(counts.items()):
        print(f"{schedules:7d} {what}")
    print(f"{last - first} schedules, {wrong} wrong, {time.process_time() - began:.1f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    sys.exit(run(*numbers) if len(numbers) == 2 else replay(numbers[0]))
