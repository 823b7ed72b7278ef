"""`lorafleet query ttft` out of the rollups, as numbers and as text."""

import json
from datetime import UTC, datetime

import clickhouse_connect
import pytest
from click.testing import CliRunner

from infra.cli import main
from infra.query import parse_since, ttft
from tests.infra.test_clickhouse import insert, request_row


@pytest.mark.real
def test_per_customer_and_tier(clickhouse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"at": datetime.now(UTC), "batch_day": datetime.now(UTC).date()}
    rows = [request_row(n, ttft_ms=float(n)) | now for n in range(1, 101)]
    rows += [request_row(n, "globex") | now | {"tier": "disk", "ttft_ms": 700.0} for n in range(200, 203)]
    rows += [request_row(300, "globex") | now | {"outcome": "unavailable", "ttft_ms": -1.0, "tier": "none"}]
    with clickhouse_connect.get_client(dsn=clickhouse) as client:
        insert(client, "requests", rows, "block")
    acme, disk, none = ttft(clickhouse, 3600)
    assert (acme.customer, acme.tier, acme.requests, acme.failed) == ("acme", "gpu", 100, 0)
    assert acme.p50_ms == pytest.approx(50, abs=1)
    assert acme.p95_ms == pytest.approx(95, abs=1)
    assert (acme.max_ms, acme.prompt_tokens, acme.output_tokens) == (100.0, 2000, 1000)
    assert (disk.customer, disk.tier, disk.requests, disk.p95_ms) == ("globex", "disk", 3, 700.0)
    assert (none.requests, none.failed, none.p50_ms, none.max_ms) == (1, 1, None, None)

    monkeypatch.setenv("CLICKHOUSE_URL", clickhouse)
    table = CliRunner().invoke(main, ["query", "ttft", "--since", "1d"])
    assert table.exit_code == 0
    assert "globex" in table.output
    shown = json.loads(CliRunner().invoke(main, ["query", "ttft", "--json"]).output)
    assert [row["customer"] for row in shown] == ["acme", "globex", "globex"]


def test_spans() -> None:
    assert [parse_since(text) for text in ("90s", "15m", "1h", "7d")] == [90, 900, 3600, 604_800]
    for text in ("", "1", "h", "0h", "-1h", "1.5h", "1 h", "1w", "9999999s", "1h\n"):
        with pytest.raises(ValueError, match="is no time span"):
            parse_since(text)


def test_unreachable_clickhouse_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLICKHOUSE_URL", "http://127.0.0.1:9/lorafleet")
    result = CliRunner().invoke(main, ["query", "ttft"])
    assert result.exit_code == 1
    assert result.output.startswith("ClickHouse: ")
    assert len(result.output.splitlines()) == 1
