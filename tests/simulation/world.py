"""One schedule: the heap of what happens next, the faults, and the checks that hold in all of them."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from gateway.flight import Action, SendCancel
from schemas.adapters import AdapterRecord
from schemas.reasons import AdapterStatus, Outcome, RejectReason
from schemas.requests import Submit
from schemas.tokens import Rejected, TokenBatch, Tokens
from tests.simulation.engine import END_OF_TEXT, answer
from tests.simulation.gateway import Client, Gateway
from tests.simulation.log import Broker
from tests.simulation.process import Process
from tests.simulation.schedule import Schedule
from tests.simulation.worker import BASE, Worker

PROMPT_END_S = 3.0  # an End comes so long after the deadline at most, faults apart
CANCEL_S = 4.0  # until a row that nobody wants is gone, faults apart
GHOST_S = 12.0  # until the rows of a dead gateway are gone, faults apart
SETTLE_S = 8.0  # from the last request's end until everything is at rest


class Broken(AssertionError):
    """An invariant does not hold."""


def adapter(name: str, version: int, content: int, status: AdapterStatus = AdapterStatus.READY) -> AdapterRecord:
    """A row of the adapters' table; only what an Inbox looks at is filled in."""
    adapter_id, content_id = f"{name}@{version}", f"c{content}"
    return AdapterRecord(adapter_id, "acme", version, BASE, 8, 16.0, [], 1, "", "", "", "", content_id, status, 0, 0, 0)


class World:
    """Runs one Schedule. Deterministic: the same schedule gives the same trace."""

    def __init__(self, schedule: Schedule, tracing: bool = False) -> None:
        self.schedule, self.chances = schedule, schedule.chances
        self.rng = random.Random(schedule.seed)
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.tracing = tracing
        self.lines: list[str] = []
        self.broker = Broker(self, schedule.workers, schedule.gateways, schedule.outages)
        self.processes: list[Process] = []  # those that have not ended
        self.clients = [Client(**asked) for asked in schedule.requests]
        self._lives = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0
        self._newest: dict[tuple[str, int], int] = {}
        self._unwanted_since: dict[tuple[str, str, int], float] = {}
        self._gateway_ends: dict[tuple[int, int], float] = {}

    # The heap.
    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (when, self._pushed, call, args))

    def run(self) -> Counter[str]:
        """To the end, or raises Broken."""
        for record in (adapter("a", 1, 1), adapter("b", 1, 3)):
            self.broker.adapters.append(record, 0.0)
        for fault in self.schedule.faults:
            self.at(fault[0], getattr(self, fault[1]), *fault[2:])
        for client in self.clients:
            self.at(client.opens_at, self._open, client)
        for began, ended in self.schedule.outages:
            self.at(began, self._outage, False)
            self.at(ended, self._outage, True)
        self.at(self.schedule.quiet_at, self._heal)
        self.at(self.schedule.quiet_at + self.schedule.heals_s, self._probe)
        end = self.at_most()
        while self._heap:
            self.now, _, call, args = heapq.heappop(self._heap)
            if self.now > end:
                raise Broken(f"not at rest at {end:.1f}: {self._unrest()}")
            call(*args)
            if call == self._rest and self._unrest() is None:
                self._check_end()
                return self.counts
        raise Broken("nothing happens any more")

    def at_most(self) -> float:
        deadlines = [c.opens_at + c.deadline_s for c in self.clients]
        healed = self.schedule.quiet_at + self.schedule.heals_s + 6.0
        return max([healed, self.schedule.quiet_at + GHOST_S, *deadlines]) + SETTLE_S

    def trace(self, line: str) -> None:
        if self.tracing:
            self.lines.append(f"{self.now:7.3f} {line}")

    def count(self, what: str) -> None:
        self.counts[what] += 1

    # The processes.
    def next_life(self) -> int:
        self._lives += 1
        return self._lives

    def spawn(self, kind: str, place: int, take_over: bool) -> None:
        process = (Worker if kind == "worker" else Gateway)(self, place, take_over)
        self.processes.append(process)
        self.trace(f"{process.name} starts{', taking over' if take_over else ''}")
        self.at(self.now, process.turn)

    def took_place(self, process: Process) -> None:
        key = (process.kind, process.place)
        self._newest[key] = max(process.incarnation, self._newest.get(key, -1))
        # What lies between its start and its claim would else be answered by nobody.
        claim = process.table().values[process.incarnation]
        assert process.hot is not None
        if process.hot.positions[0] != claim.start_offset:
            raise Broken(f"{process.name} claimed from {claim.start_offset} and reads from {process.hot.positions[0]}")

    def process_ended(self, process: Process) -> None:
        self.processes.remove(process)
        if isinstance(process, Gateway):
            if process.serving or process.incarnation >= 0:
                self._gateway_ends[process.place, process.incarnation] = self.now
            self._count_redrives(process)
            for client in process.clients.values():
                if client.outcome is None:  # its connection breaks
                    client.outcome, client.finish = Outcome.GATEWAY_LOST, "gateway_lost"

    def _count_redrives(self, gateway: Gateway) -> None:
        if gateway.flights is not None and gateway.flights.redrives:
            self.counts["redrives"] += gateway.flights.redrives

    def _holder(self, kind: str, place: int) -> Process | None:
        """The process that holds the place, or else one that tries to."""
        found = [p for p in self.processes if p.kind == kind and p.place == place]
        return max(found, key=lambda p: p.incarnation, default=None)

    # The faults: their names are those in Schedule.faults.
    def kill(self, kind: str, place: int, restart_s: float | None, take_over: bool) -> None:
        process = self._holder(kind, place)
        if process is not None:
            self.count(f"kills of a {kind}")
            process.end("killed")
        if restart_s is not None:
            self.at(self.now + restart_s, self.spawn, kind, place, take_over)

    def crash(self, place: int, restart_s: float) -> None:
        worker = self._holder("worker", place)
        if isinstance(worker, Worker):
            self.count("engine crashes")
            worker.crash_engine()
        self.at(self.now + restart_s, self.spawn, "worker", place, True)

    def hang(self, place: int, seconds: float) -> None:
        worker = self._holder("worker", place)
        if isinstance(worker, Worker):
            self.count("engine hangs")
            worker.hang(seconds)

    def drain(self, place: int) -> None:
        worker = self._holder("worker", place)
        if isinstance(worker, Worker):
            self.count("drains")
            worker.drain()

    def pause(self, kind: str, place: int, seconds: float) -> None:
        process = self._holder(kind, place)
        if process is not None:
            self.count("pauses")
            process.pause(seconds)

    def deafen(self, kind: str, place: int, hot: bool, seconds: float) -> None:
        """One reader of one process gets no answer."""
        process = self._holder(kind, place)
        if process is not None:
            reader = process.hot if hot else process.tables
            if reader is not None:
                self.trace(f"{process.name} hears no {'records' if hot else 'tables'} for {seconds:.1f} s")
                reader.deaf_until = self.now + seconds

    def rewind(self, kind: str, place: int, records: int) -> None:
        """A rebuilt reader reads some records again."""
        process = self._holder(kind, place)
        if process is not None and process.hot is not None:
            process.hot.positions[0] = max(process.start_offset, process.hot.positions[0] - records)
            self.trace(f"{process.name} reads again from {process.hot.positions[0]}")

    def lose_place(self, place: int) -> None:
        process = self._holder("gateway", place)
        if isinstance(process, Gateway):
            process.run(process.lose_place)

    def retire(self) -> None:
        """Version 2 comes, and then version 1 goes."""
        self.broker.adapters.append(adapter("a", 2, 2), self.now)
        self.at(self.now + self.rng.random(), self._retired)

    def _retired(self) -> None:
        self.broker.adapters.append(adapter("a", 1, 1, AdapterStatus.RETIRED), self.now)

    def _outage(self, up: bool) -> None:
        self.broker.up = up
        self.count("outages")
        self.trace(f"the broker is {'back' if up else 'away'}")
        if up:
            for process in self.processes:
                for reader in (process.tables, process.hot):
                    if reader is not None:
                        reader.deaf_until = max(reader.deaf_until, self.now + self.rng.random())

    def _heal(self) -> None:
        """The last fault is over: whoever is missing is started."""
        self.chances.lost = self.chances.given_up = 0.0
        self.trace("no more faults")
        for kind, count in (("worker", self.schedule.workers), ("gateway", self.schedule.gateways)):
            for place in range(count):
                process = self._holder(kind, place)
                if process is None:
                    self.spawn(kind, place, False)
                elif isinstance(process, Worker) and process.draining:
                    self.at(self.now + 0.5, self._replace_drained, place)
        self._rest()

    def _replace_drained(self, place: int) -> None:
        if self._holder("worker", place) is None:
            self.spawn("worker", place, True)
        else:
            self.at(self.now + 0.5, self._replace_drained, place)

    # The clients.
    def _open(self, client: Client) -> None:
        process = self._holder("gateway", client.place)
        if not isinstance(process, Gateway) or not process.serving:
            self._client_refused(client)
        elif self.now < process.paused_until:
            self.at(process.paused_until + 0.01, self._open, client)
        else:
            process.run(process.open, client)

    def _client_refused(self, client: Client) -> None:
        if client.probe:
            raise Broken(f"gateway {client.place} does not serve")
        client.outcome, client.finish = Outcome.UNAVAILABLE, "no gateway"
        self.count("no gateway")

    def _probe(self) -> None:
        for place in range(self.schedule.gateways):
            probe = Client(f"probe-{place}", place, "b", 900 + place, 3, 6.0, self.now, probe=True)
            self.clients.append(probe)
            self._open(probe)

    def client_submitted(self, client: Client, submit: Submit) -> None:
        if client.got and (submit.content_id != client.content_id or submit.generated != client.got):
            raise Broken(f"{client.request_id} got {client.got} of {client.content_id}, and now {submit}")
        if submit.attempt and submit.content_id != client.content_id:
            self.count("aliases resolved anew")
        client.content_id = submit.content_id
        if client.model and not submit.adapter.startswith(client.model + "@"):
            raise Broken(f"{client.request_id} asked for {client.model}, not for {submit.adapter}")
        if submit.attempt:
            self.count("further attempts")

    def client_got(self, client: Client, ids: list[int]) -> None:
        if client.outcome is not None:
            raise Broken(f"{client.request_id} ended as {client.outcome} and gets {ids}")
        right = answer(client.prompt, client.content_id, client.max_tokens)
        at = len(client.got)
        if not ids or tuple(ids) != right[at : at + len(ids)]:
            raise Broken(f"{client.request_id} gets {ids} at {at}, and {right[at : at + len(ids)]} is right")
        client.got += ids

    def client_ended(self, client: Client, outcome: Outcome, finish: str) -> None:
        if client.outcome is not None:
            raise Broken(f"{client.request_id} ends as {outcome}, and ended as {client.outcome}")
        client.outcome, client.finish, client.ended_at = outcome, finish, self.now
        self.count(f"ended {outcome}: {finish}")
        right = answer(client.prompt, client.content_id, client.max_tokens)
        if outcome is Outcome.OK and client.stops_after is None and tuple(client.got) != right:
            raise Broken(f"{client.request_id} ended well after {len(client.got)} of {len(right)} tokens")
        stopped = client.got[-1:] == [END_OF_TEXT]
        if outcome is Outcome.OK and finish != ("stop" if stopped else "length") and client.stops_after is None:
            raise Broken(f"{client.request_id} ended by {finish}")
        if client.got and outcome in (Outcome.OVERLOADED, Outcome.UNAVAILABLE):
            raise Broken(f"{client.request_id} has {len(client.got)} tokens, and ends as {outcome}: {finish}")
        if outcome is Outcome.DEADLINE and self.now < client.deadline_at:
            raise Broken(f"{client.request_id} ends {client.deadline_at - self.now:.3f} s before its deadline")
        if self.now > max(client.deadline_at, self.schedule.quiet_at) + PROMPT_END_S:
            raise Broken(f"{client.request_id} ends {self.now - client.deadline_at:.1f} s after its deadline")
        full = outcome in (Outcome.OVERLOADED, Outcome.DEADLINE) and self.chances.tight
        if client.probe and outcome is not Outcome.OK and not full:
            raise Broken(f"all is healed, and {client.request_id} ends as {outcome}: {finish}")

    # The checks that look into processes.
    def count_zombie(self, process: Process) -> None:
        if process.incarnation < self._newest[process.kind, process.place]:
            self.count("zombie turns")

    def check_admission(self, worker: Worker, submit: Submit) -> None:
        if (submit.replica, submit.incarnation) != (worker.place, worker.incarnation):
            raise Broken(f"{worker.name}, incarnation {worker.incarnation}, takes {submit}")

    def check_accepted(self, gateway: Gateway, batch: TokenBatch, actions: list[Action], redriven: bool) -> None:
        """What a gateway takes comes from the attempt it waits for, and from no holder that it knows was replaced."""
        holder = gateway.fleet.holders.get(batch.replica)
        if holder is not None and holder.incarnation > batch.incarnation:
            if any(not isinstance(action, SendCancel) for action in actions):
                raise Broken(f"{gateway.name} takes {batch}, and knows of incarnation {holder.incarnation}")
            if batch.gateway_incarnation == gateway.incarnation:
                self.count("zombie words dropped")
        if redriven and any(isinstance(event, Tokens) for event in batch.events):
            self.count("gaps")
        if actions and any(isinstance(e, Rejected) and e.reason is RejectReason.STALE for e in batch.events):
            self.count("stale rejections heard")

    def check_rows(self, worker: Worker) -> None:
        """No row outlives its deadline; none outlives its gateway, its request or its attempt for long."""
        for key, row in worker.engine.rows.items():
            submit, healed = row.submit, self.schedule.quiet_at
            where = f"{worker.name} runs {submit.request_id}/{submit.attempt}"
            if self.now > max(row.deadline_at, healed) + PROMPT_END_S:
                raise Broken(f"{where}, {self.now - row.deadline_at:.1f} s after its deadline")
            ended_at = self._gateway_ends.get((submit.gateway, submit.gateway_incarnation))
            if ended_at is not None:
                if self.now > max(ended_at, healed) + GHOST_S:
                    raise Broken(f"{where} for a gateway that died {self.now - ended_at:.1f} s ago")
            elif self._unwanted(submit):
                since = self._unwanted_since.setdefault((worker.name, *key), self.now)
                # Where records get lost the Cancel may be, and then the deadline does the rest.
                if not self.schedule.lossy and self.now > max(since, healed) + CANCEL_S:
                    raise Broken(f"{where}, which nobody has wanted for {self.now - since:.1f} s")

    def _unwanted(self, submit: Submit) -> bool:
        for process in self.processes:
            if isinstance(process, Gateway) and process.incarnation == submit.gateway_incarnation:
                flight = process.flights.get(submit.request_id) if process.flights is not None else None
                return flight is None or flight.attempt != submit.attempt
        return True

    # The end.
    def _rest(self) -> None:
        self.at(self.now + 0.5, self._rest)

    def _unrest(self) -> str | None:
        """What still goes on; None if nothing does."""
        if self.now < self.schedule.quiet_at + self.schedule.heals_s:
            return "faults are healing"
        for client in self.clients:
            if client.outcome is None:
                return f"{client.request_id} is open"
        for process in self.processes:
            if isinstance(process, Worker) and process.engine.rows:
                return f"{process.name} has rows"
            if isinstance(process, Gateway) and process.serving:
                for holder in process.fleet.holders.alive(process.clock.now):
                    load = process.fleet.loads.load(holder.place, holder.incarnation)
                    if load:
                        return f"{process.name} sees {load} tokens in flight at idle replica {holder.place}"
        return None

    def _check_end(self) -> None:
        for process in self.processes:
            if isinstance(process, Gateway) and process.flights is not None:
                self._count_redrives(process)
                if len(process.flights):
                    raise Broken(f"{process.name} still has {len(process.flights)} open flights")
        if self.schedule.peaceful:
            if self.counts["redrives"]:
                raise Broken(f"{self.counts['redrives']} re-drives though no replica failed")
            for client in self.clients:
                fine = (Outcome.OK, Outcome.CANCELLED, Outcome.GATEWAY_LOST, Outcome.UNAVAILABLE, Outcome.OVERLOADED)
                late = client.outcome is Outcome.DEADLINE and self.schedule.slow
                if client.outcome not in fine and not late:
                    raise Broken(f"{client.request_id} ended as {client.outcome}: {client.finish}")
