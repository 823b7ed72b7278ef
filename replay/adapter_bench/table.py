"""What a person sees of `lorafleet bench adapters` at its end."""

from rich.console import Group
from rich.table import Table

from replay.adapter_bench.decode import Decode
from replay.adapter_bench.measure import Result
from replay.adapter_bench.steps import TARGET, Step
from replay.engine_bench.table import plain_table


def tables(results: list[Result]) -> Group:
    (result,) = results
    return Group(
        _steps(result.steps), plain_table(result.ttft), _decode(result.decode), plain_table(result.registrations),
        plain_table(result.restarts), plain_table(result.growth),
    )  # fmt: skip


def _steps(steps: list[Step]) -> Table:
    table = Table(
        "adapter", "step", "ms", "low..high", "MB/s", "beside", "ms", "MB/s", "ratio", f"<= {TARGET:g}", "brief ms"
    )
    for step in steps:
        cells = (
            f"{step.ms:g}", f"{step.lowest_ms:g}..{step.highest_ms:g}", f"{step.mb_s:g}", step.beside,
            f"{step.beside_ms:g}", f"{step.beside_mb_s:g}", f"{step.ratio:.2f}", _held(step.held),
            f"{step.brief_ms:g}" if step.brief_ms else "",
        )  # fmt: skip
        table.add_row(step.adapter, step.step, *cells)
    return table


def _decode(decodes: list[Decode]) -> Table:
    table = Table("loads meanwhile", "per s", "rows", "turns", "tok/s", "ratio", "low..high", "within 5 %")
    for row in decodes:
        cells = (f"{row.loads_per_s:g}", str(row.rows), str(row.turns), f"{row.tokens_s:g}", f"{row.ratio:.3f}")
        table.add_row(row.loads, *cells, f"{row.lowest:.3f}..{row.highest:.3f}", _held(row.held))
    return table


def _held(held: bool) -> str:
    return "held" if held else "missed"
