"""The simulation's Kafka: partitions with offsets, a broker that goes away, writers in lanes, readers that lag.

A record lands after a delay, in the order of its lane (one process, one partition), once or twice; its writer hears of
it later, or not in time. Readers see what landed `lag` seconds ago, unless the broker is away or they are deaf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.story import told

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.world import World


class Lost:
    """Stands where a record was acknowledged and then lost by the broker."""


LOST = Lost()


class Partition:
    """A record's offset is its index. `landed` are the times at which they came."""

    __slots__ = ("landed", "name", "values")

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[Any] = []
        self.landed: list[float] = []

    def append(self, value: Any, now: float) -> int:
        self.values.append(value)
        self.landed.append(now)
        return len(self.values) - 1


class Broker:
    """`outages` are known from the start: (from, to), apart from each other, in order."""

    def __init__(self, world: World, workers: int, gateways: int, outages: list[tuple[float, float]]) -> None:
        self.world, self.outages = world, outages
        self.up = True
        self.requests = [Partition(f"requests/{n}") for n in range(workers)]
        self.tokens = [Partition(f"tokens/{n}") for n in range(gateways)]
        self.replicas, self.gateways = Partition("replicas"), Partition("gateways")
        self.adapters = Partition("adapters")

    def answers_at(self, at: float, process: Process) -> float:
        """When it answers what reaches it at `at`: in an outage, once the process has found it again."""
        for began, ended in self.outages:
            # Back-off grows with the outage.
            found_at = ended + process.sluggish * min(self.world.chances.reconnect_s, 0.7 * (ended - began))
            if began <= at < found_at:
                at = found_at
        return at


class Lane:
    """What one process writes to one partition."""

    __slots__ = ("cut", "free_at", "partition", "process")

    def __init__(self, process: Process, partition: Partition) -> None:
        self.process, self.partition = process, partition
        self.free_at = 0.0
        self.cut = False  # its process died, and what it had not sent by then never comes

    def send(
        self,
        value: Any,
        limit_s: float = 60.0,
        written: Callable[[int], None] | None = None,
        failed: Callable[[], None] | None = None,
        sure: bool = False,
    ) -> None:
        """After `limit_s` without an acknowledgement it counts as failed, and may land or not all the same.

        `sure`: neither lost nor there twice.
        """
        process = self.process
        world, broker = process.world, process.world.broker
        rng, now, chances = world.rng, world.now, world.chances
        slow = chances.slow_write and rng.random() < chances.slow_write
        lands_at = max(self.free_at, now + (0.5 if slow else 0.04) * rng.random() + 0.001)
        lands_at = broker.answers_at(lands_at, process)
        self.free_at = lands_at
        heard_at = broker.answers_at(lands_at + 0.04 * rng.random(), process)
        if heard_at > now + limit_s:
            if failed is not None:
                world.at(now + limit_s, process.run, failed)
            written = None
            if lands_at > now + limit_s and rng.random() < 0.5:
                return  # withdrawn in time
        if not sure and chances.lost and rng.random() < chances.lost:
            value = LOST
            world.count("records lost")
        world.at(lands_at, self._land, value, heard_at, written, sure)

    def _land(self, value: Any, heard_at: float, written: Callable[[int], None] | None, sure: bool) -> None:
        world = self.process.world
        if self.cut or (self.process.ended and not self.process.last_words and world.rng.random() < 0.5):
            self.cut = True
            return
        offset = self.partition.append(value, world.now)
        if world.tracing:
            world.trace(f"{self.partition.name}@{offset} <- {self.process.name}: {told(value)}")
        if written is not None:
            world.at(heard_at, self.process.run, written, offset)
        if world.chances.twice and not sure and value is not LOST and world.rng.random() < world.chances.twice:
            world.count("records twice")
            world.at(world.now + 0.6 * world.rng.random(), self._again, value)

    def _again(self, value: Any) -> None:
        offset = self.partition.append(value, self.process.world.now)
        if self.process.world.tracing:
            self.process.world.trace(f"{self.partition.name}@{offset} <- {self.process.name} again: {told(value)}")


class Reader:
    """Several partitions from given positions on; all of them are heard, or none."""

    __slots__ = ("deaf_until", "fetched_at", "lags", "partitions", "positions", "process")

    def __init__(self, process: Process, partitions: list[Partition], positions: list[int], lags: list[float]) -> None:
        self.process, self.partitions, self.positions, self.lags = process, partitions, positions, lags
        self.deaf_until = 0.0
        self.fetched_at = -1e9

    def poll(self, now: float) -> list[tuple[int, int, Any]]:
        """(partition's index here, offset, value) of what is new."""
        if not self.process.world.broker.up or now < self.deaf_until:
            return []
        self.fetched_at = now
        found: list[tuple[int, int, Any]] = []
        for index, partition in enumerate(self.partitions):
            position, landed = self.positions[index], partition.landed
            end = len(landed)
            if position == end:
                continue
            seen = now - self.lags[index]
            while position < end and landed[position] <= seen:
                value = partition.values[position]
                if value is not LOST:
                    found.append((index, position, value))
                position += 1
            self.positions[index] = position
        return found
