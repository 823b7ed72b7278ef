"""What the commands that speak to the internal API share: how an answer is got, and how it is shown."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from infra.flags import FAILED, NO_STACK, NOT_THERE, NOT_YET, REFUSED, fail
from infra.internal_api import InternalApi, NoStackError

NUMBERS = (
    "rank", "size_bytes", "weight", "max_in_flight", "requests_per_minute", "tokens_per_minute",
    "gpu", "ram", "disk", "queue_depth", "running", "tokens_in_flight", "loads_per_min", "evictions_per_min", "failed",
)  # fmt: skip
CODES = {400: REFUSED, 404: NOT_THERE, 409: REFUSED, 422: REFUSED, 504: NOT_YET}


def ask(home: Path, method: str, path: str, body: object = None) -> dict[str, Any]:
    """The answer of a call that succeeded; else the end, with the reasons."""
    try:
        status, told = InternalApi(home.absolute()).call(method, path, body)
    except NoStackError as error:
        fail(str(error), NO_STACK)
    if status >= 400:
        reasons = [f"{reason['field']}: {reason['message']}" for reason in told.get("refusals", [])]
        fail("\n".join(reasons or [told["error"]["message"]]), CODES.get(status, FAILED))
    return told


def say(told: dict[str, Any], text: str, wants_json: bool) -> None:
    click.echo(as_json(told) if wants_json else text)


def show_one(told: dict[str, Any], wants_json: bool) -> None:
    if wants_json:
        click.echo(as_json(told))
        return
    width = max(len(name) for name in told)
    for name, value in told.items():
        click.echo(f"{name:{width}}  {_cell(name, value)}")


def show_rows(rows: list[dict[str, Any]], customer: str, columns: dict[str, str], wants_json: bool) -> None:
    rows = [row for row in rows if not customer or row["customer"] == customer]
    if wants_json:
        click.echo(as_json(rows))
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, heading in columns.items():
        table.add_column(heading, justify="right" if name in NUMBERS else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(name, row.get(name, "")) for name in columns))
        for reason in row.get("reasons", []):
            table.add_row("", f"{reason['field']}: {reason['message']}")
    Console().print(table)


def _cell(name: str, value: Any) -> str:
    if name.endswith("_unix_ms"):
        if not value:
            return "-"
        return datetime.fromtimestamp(value / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    if value is None:
        return "-"
    if name == "trial":
        return f"{value['adapter_id']} {value['share']:.1%}"
    if name == "share":
        return f"{value:.1%}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


def as_json(told: object) -> str:
    return msgspec.json.format(msgspec.json.encode(told)).decode()
