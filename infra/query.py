"""Questions to ClickHouse that operators ask most, out of the minute rollups."""

import math
import re

import clickhouse_connect
import msgspec
from rich import box
from rich.table import Table

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

TTFT = """\
SELECT
    customer,
    tier,
    sum(requests) AS asked,
    sumIf(requests, outcome != 'ok') AS failed,
    sum(prompt_tokens) AS prompt,
    sum(output_tokens) AS output,
    quantilesTimingMerge(0.5, 0.95, 0.99)(ttft_ms) AS quantiles,
    max(ttft_max_ms) AS longest
FROM tenant_1m
WHERE minute >= toStartOfMinute(now('UTC') - {seconds:UInt32})
GROUP BY customer, tier
ORDER BY customer, tier
"""


class Ttft(msgspec.Struct, frozen=True):
    """Times to first token of one customer's requests in one tier; None where none had a token.

    `failed` counts every outcome but ok.
    """

    customer: str
    tier: str
    requests: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    p50_ms: float | None
    p95_ms: float | None
    max_ms: float | None


def parse_since(text: str) -> int:
    """Seconds in `90s`, `15m`, `1h`, `7d`. Raises ValueError."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})([smhd])", text)
    if not found:
        raise ValueError(f"{text!r} is no time span: write a number and s, m, h or d, such as 90s, 15m, 1h or 7d")
    return int(found[1]) * SECONDS[found[2]]


def ttft(url: str, since_s: int) -> list[Ttft]:
    """Per customer and tier, since the start of the minute `since_s` ago. Blocks. Raises ClickHouseError."""
    with clickhouse_connect.get_client(dsn=url) as client:
        rows = client.query(TTFT, parameters={"seconds": since_s}).result_rows
    return [
        Ttft(customer, tier, asked, failed, prompt, output, _ms(quantiles[0]), _ms(quantiles[1]), _ms(longest))
        for customer, tier, asked, failed, prompt, output, quantiles, longest in rows
    ]


def ttft_table(rows: list[Ttft], since: str) -> Table:
    table = Table(
        title=f"Time to first token, last {since}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for heading in ("customer", "tier"):
        table.add_column(heading, overflow="fold")
    for heading in ("requests", "failed", "p50 ms", "p95 ms", "max ms", "tokens\nin", "tokens\nout"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        times = (f"{ms:,.0f}" if ms is not None else "-" for ms in (row.p50_ms, row.p95_ms, row.max_ms))
        tokens = (f"{row.prompt_tokens:,}", f"{row.output_tokens:,}")
        table.add_row(row.customer, row.tier, f"{row.requests:,}", f"{row.failed:,}", *times, *tokens)
    return table


def _ms(value: float) -> float | None:
    """Quantiles of nothing are NaN; a request without a token has -1."""
    return None if math.isnan(value) or value < 0 else round(value, 3)
