"""What a person sees of `lorafleet bench engine`: a bar while it runs, tables at its end."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from replay.engine_bench.measure import Result


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """A bar for each stage that begins; nothing where the output is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def stage(name: str, parts: int) -> Callable[[], None]:
            task = progress.add_task(name, total=parts)
            return lambda: progress.advance(task)

        yield stage


def plain_table(results: Sequence[msgspec.Struct]) -> Table:
    """A column for each field, a line for each result."""
    table = Table(
        *(field.name.replace("tokens_s", "tok/s").replace("_", " ") for field in msgspec.structs.fields(results[0]))
    )
    for result in results:
        table.add_row(*map(str, msgspec.structs.astuple(result)))
    return table


def tables(results: list[Result]) -> Group:
    (result,) = results
    return Group(_rows(result), _overheads(result), _lines(result))


def _rows(result: Result) -> Table:
    table = Table(
        "at once", "tok/s", "low..high", "TTFT p50 ms", "p95 ms", "TPOT ms", "peak MiB", "limit tok/s",
        "of it", title="32 requests, float32, greedy",
    )  # fmt: skip
    for row in result.rows:
        limit = (f"{row.limit_tokens_s:g} ({row.limit_by})", f"{row.of_limit:.0%}") if row.limit_tokens_s else ("", "")
        spread = f"{row.lowest:g}..{row.highest:g}"
        cells = (row.tokens_s, spread, row.ttft_p50_ms, row.ttft_p95_ms, row.tpot_ms, row.peak_mib)
        table.add_row(row.name, *map(str, cells), *limit)
    return table


def _overheads(result: Result) -> Table:
    table = Table("overhead of a step", "adapters", "pairs", "without ms", "median %", "95 % interval")
    for o in result.overheads:
        table.add_row(
            o.step, str(o.adapters), str(o.pairs), f"{o.base_ms:g}", f"{o.percent:+g}", f"{o.low:+g}..{o.high:+g}"
        )
    return table


def _lines(result: Result) -> str:
    best = result.best
    lines = [
        f"{result.formula}; {best.gflops:.0f} GFLOP/s, {best.gbytes_s:.1f} GB/s",
        *(
            f"  {count} adapters: {limit.flops / 1e9:.0f} GFLOP, {limit.bytes / 1e9:.1f} GB: {limit.seconds:.2f} s"
            f" by {limit.by}"
            for count, limit in result.limits.items()
        ),
        f"one stream alone: {result.alone.tokens_s:.1f} tok/s, its bandwidth limit {result.alone.limit_tokens_s:.1f}",
        *(
            f"{r.registered} registered, {r.active} active: {r.tokens_s:g} tok/s ({r.change_percent:+g} %)"
            for r in result.registered
        ),
        *(
            f"bfloat16 weights, {n.adapters} adapters: {n.bf16_tokens_s:g} tok/s against {n.f32_tokens_s:g} in float32"
            f" ({n.tokens_ratio:g} times), a decode step {n.bf16_step_ms:g} ms against {n.f32_step_ms:g}"
            f" ({n.step_ratio:g} times)"
            for n in result.narrow
        ),
        *(f"{ratio:g} times {name}" for name, ratio in result.ratios.items()),
        *result.peers_missing,
    ]
    return "\n".join(lines)
