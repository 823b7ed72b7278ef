"""How fast is the engine with 0, 1, 8, 32 adapters in the batch, beside this machine's limit and beside its peers?

Everything is measured in one run: rows take turns, steps of two kinds alternate, and the limit comes from rates that
were measured in between, because machines that are shared change from minute to minute.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from infra.local.model import packaged_model
from replay.engine_bench import machine, peers
from replay.engine_bench.bf16 import Narrow, bf16_copy, measure_bf16
from replay.engine_bench.registered import Registered, measure_registered
from replay.engine_bench.rig import RANK, REQUESTS, Rig, Served, base_leases, image_of, shared, turns, write_adapters
from schemas.engine import LoadSlot
from streams.adapters.shape import ModelShape
from workers.engine import scheduler
from workers.engine.slots import Lease

_PEER_TIMEOUT_S = 900
_RESAMPLES = 2000


class Plan(msgspec.Struct, frozen=True):
    """`adapters`: how many different ones, per row. `rounds`: runs of each row, `pairs`: of alternating steps."""

    adapters: list[int]
    prompt: int = 128
    output: int = 64
    rounds: int = 3
    pairs: int = 200
    threads: int = 2
    peers: bool = True
    registered: tuple[int, ...] = (5, 500, 5000)  # or as many as are active, if those are more


class Row(msgspec.Struct, frozen=True):
    """One way to serve the same requests. Medians over `rounds`, and the lowest and highest tok/s of them."""

    name: str
    tokens_s: float
    lowest: float
    highest: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_ms: float
    peak_mib: float
    limit_tokens_s: float = 0.0
    of_limit: float = 0.0
    limit_by: str = ""


class Overhead(msgspec.Struct, frozen=True):
    """Median of the ratios of alternating steps minus 1, with its bootstrap 95 % interval, in percent."""

    step: str
    adapters: int
    pairs: int
    base_ms: float
    percent: float
    low: float
    high: float


class Alone(msgspec.Struct, frozen=True):
    """One stream of the base beside what reading its weights takes."""

    tokens_s: float
    limit_tokens_s: float


class Result(msgspec.Struct, frozen=True):
    rows: list[Row]
    overheads: list[Overhead]
    alone: Alone
    registered: list[Registered]
    narrow: list[Narrow]
    best: machine.Best
    limits: dict[str, machine.Limit]
    formula: str
    peers_missing: list[str]
    ratios: dict[str, float]


def measure(plan: Plan, stage: Callable[[str, int], Callable[[], None]]) -> Result:
    """`stage(name, parts)` is told what begins, and gives what to call after each part."""
    model = packaged_model()
    shape = ModelShape.of(model)
    most = max([*plan.adapters, 1])
    with tempfile.TemporaryDirectory(prefix="lorafleet-bench-") as folder:
        told = stage("adapters", most)
        images = []
        for number, adapter in enumerate(write_adapters(Path(folder), shape, max(most, REQUESTS if plan.peers else 0))):
            if number < most:
                images.append(image_of(adapter, Path(folder) / f"image-{number}", shape))
                told()
        ours = _ours(plan, model, shape, images, stage)
        rows, missing = list(ours.rows), []
        if plan.peers:
            told = stage("peers", len(peers.PEERS))
            for peer in peers.PEERS:
                rows.append(_peer(peer, plan, model, Path(folder)))
                told()
            if importlib.util.find_spec("vllm") is None:
                missing.append("vLLM is not installed")
    return msgspec.structs.replace(ours, rows=rows, peers_missing=missing, ratios=_ratios(rows))


def _ours(
    plan: Plan, model: Path, shape: ModelShape, images: list[LoadSlot], stage: Callable[[str, int], Callable[[], None]]
) -> Result:
    most = len(images)
    rig = Rig(model, plan.threads, most, plan.prompt + plan.output)
    told = stage("machine", 1)
    best = machine.measure(shape, rig.operations, plan.threads)
    told()
    leases: list[Lease] = []
    served: dict[int, list[Served]] = {count: [] for count in plan.adapters}
    peaks: dict[int, float] = {}
    told = stage("requests", plan.rounds * len(plan.adapters))
    rig.serve([""] * 2, 16, 2)
    for _ in range(plan.rounds):
        for count in plan.adapters:  # ascending, so that the first round's peaks grow with what is loaded
            _forget_peak()
            leases += [rig.load(image) for image in images[len(leases) : count]]
            contents = [lease.content_id for lease in shared(leases[:count])] if count else [""] * REQUESTS
            served[count].append(rig.serve(contents, plan.prompt, plan.output))
            peaks.setdefault(count, _peak_mib())
            told()
    alone = []
    told = stage("one stream", plan.rounds)
    for _ in range(plan.rounds):
        alone.append(1 / median(rig.serve([""], plan.prompt, plan.output).tpot_s))
        told()
    overheads = _overheads(plan, rig, leases, stage)
    registered = measure_registered(list(plan.registered), rig, images, plan.prompt, max(2, plan.output // 4), stage)
    with tempfile.TemporaryDirectory(prefix="lorafleet-bench-") as folder:
        copy = bf16_copy(model, Path(folder) / "bf16")
        sizes = (plan.prompt, plan.output)
        other = Rig(copy, plan.threads, most, sum(sizes))
        narrow = measure_bf16(rig, other, images, sizes, (plan.rounds, plan.pairs), stage)
    best = machine.measure(shape, rig.operations, plan.threads, best)
    limits = {
        str(count): machine.limit(shape, best, REQUESTS, plan.prompt, plan.output, count, RANK)
        for count in plan.adapters
    }
    weights = 4 * sum(machine.base_parameters(shape))
    rows = [_row(count, served[count], plan.output, peaks[count], limits[str(count)]) for count in plan.adapters]
    alone_at_best = Alone(median(alone), best.gbytes_s * 1e9 / weights)
    return Result(rows, overheads, alone_at_best, registered, narrow, best, limits, machine.FORMULA, [], {})


def _overheads(
    plan: Plan, rig: Rig, leases: list[Lease], stage: Callable[[str, int], Callable[[], None]]
) -> list[Overhead]:
    """Decode: all requests, at half their output. Prefill: a chunk of one prompt, and a chunk cut into 32 of them."""
    counts = [count for count in plan.adapters if count]
    if not counts or not plan.pairs:
        return []
    at = plan.prompt + plan.output // 2
    base = rig.decode_rows(base_leases(), at, 0)
    decode = {"base": base} | {str(n): rig.decode_rows(shared(leases[:n]), at, 1) for n in counts}
    told = stage("decode steps", plan.pairs)
    took = turns(rig, {name: _always(rows) for name, rows in decode.items()}, plan.pairs, told)
    found = [_overhead("decode, 32 rows", n, took["base"], took[str(n)]) for n in counts]
    most = max(counts)
    whole = rig.prefill_rows(base_leases()[:1], 0)
    prompts = [rig.prefill_rows([lease], 1) for lease in leases[:most]]
    cut, cut_base = rig.prefill_rows(shared(leases[:most]), 1), rig.prefill_rows(base_leases(), 0)
    told = stage("prefill steps", plan.pairs)
    took = turns(
        rig,
        {
            "base": _always(whole),
            "prompt": lambda turn: prompts[turn % most],
            "cut base": _always(cut_base),
            "cut": _always(cut),
        },
        plan.pairs,
        told,
    )
    found.append(_overhead("prefill, 1 x 128 tokens, adapters in turn", most, took["base"], took["prompt"]))
    found.append(_overhead("prefill, 32 x 4 tokens", most, took["cut base"], took["cut"]))
    return found


def _always(rows: list[scheduler.Row]) -> Callable[[int], list[scheduler.Row]]:
    return lambda _: rows


def _overhead(step: str, adapters: int, base: list[float], other: list[float]) -> Overhead:
    ratios = np.array(other) / np.array(base) - 1
    random = np.random.default_rng(0)
    samples = np.median(ratios[random.integers(0, len(ratios), (_RESAMPLES, len(ratios)))], 1)
    low, high = np.percentile(samples, (2.5, 97.5))
    return Overhead(
        step=step,
        adapters=adapters,
        pairs=len(ratios),
        base_ms=round(median(base) * 1e3, 2),
        percent=round(float(np.median(ratios)) * 100, 2),
        low=round(float(low) * 100, 2),
        high=round(float(high) * 100, 2),
    )


def _row(count: int, runs: list[Served], output: int, peak_mib: float, limit: machine.Limit) -> Row:
    rates = [run.output_tokens / run.wall_s for run in runs]
    if any(run.most_adapters != min(count, output) for run in runs):
        raise RuntimeError(f"{runs[0].most_adapters} adapters were in one step, {count} were meant to be")
    ttft = [second for run in runs for second in run.ttft_s]
    return Row(
        name=f"lorafleet, {count}",
        tokens_s=round(median(rates), 1),
        lowest=round(min(rates), 1),
        highest=round(max(rates), 1),
        ttft_p50_ms=round(float(np.percentile(ttft, 50)) * 1e3, 1),
        ttft_p95_ms=round(float(np.percentile(ttft, 95)) * 1e3, 1),
        tpot_ms=round(median(second for run in runs for second in run.tpot_s) * 1e3, 2),
        peak_mib=round(peak_mib),
        limit_tokens_s=round(limit.tokens_s, 1),
        of_limit=round(median(rates) / limit.tokens_s, 3),
        limit_by=limit.by,
    )


def _peer(peer: str, plan: Plan, model: Path, adapters: Path) -> Row:
    sizes = (plan.threads, REQUESTS, plan.prompt, plan.output)
    command = [sys.executable, "-m", "replay.engine_bench.peers", peer, str(model), str(adapters), *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, timeout=_PEER_TIMEOUT_S, text=True)
    if done.returncode:
        raise RuntimeError(f"{peer}: {done.stderr.strip()[-2000:]}")
    got = json.loads(done.stdout.splitlines()[-1])
    rate, ttft_ms = round(got["tokens_s"], 1), round(got["ttft_s"] * 1e3, 1)
    name = {"peft": "PEFT mixed, 32", "torch": "torch loop, 0"}.get(peer, f"{peer}, 0")
    return Row(name, rate, rate, rate, ttft_ms, ttft_ms, round(got["tpot_s"] * 1e3, 2), round(got["peak_mib"]))


def _ratios(rows: list[Row]) -> dict[str, float]:
    """Our rate with the most adapters over each peer's."""
    ours = [row for row in rows if row.limit_tokens_s]
    return {row.name: round(ours[-1].tokens_s / row.tokens_s, 2) for row in rows if not row.limit_tokens_s}


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_mib() -> float:
    (line,) = (text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
