import json
from datetime import date

import clickhouse_connect
import pytest

from schemas.topics import FINISHED
from streams.bus.errors import SettingsError
from streams.sink.block import Block, Bounds
from streams.sink.mirror import ADAPTER_COLUMNS, ALIAS_COLUMNS, PLACEMENT_COLUMNS
from streams.sink.progress import COLUMNS
from streams.sink.rows import TABLES, columns, day_of, row, timestamp
from streams.sink.settings import SinkSettings
from tests.streams.sink.samples import event, request


def test_a_row_has_the_fields_in_order_and_its_place() -> None:
    fields = json.loads(row(request(4, at_unix_ms=1_796_129_284_372), 3, 17, date(2026, 12, 1)))
    named = dict(zip(columns("requests"), fields, strict=True))
    assert named["request_id"] == "r4"
    assert named["at"] == "2026-12-01 12:48:04.372"
    assert named["tier"] == "gpu"
    assert named["detail"] == 'a "quote"\n and ü'
    assert (named["kafka_partition"], named["kafka_offset"], named["batch_day"]) == (3, 17, "2026-12-01")


@pytest.mark.parametrize(
    ("unix_ms", "text"), [(0, "1970-01-01 00:00:00.000"), (999, "1970-01-01 00:00:00.999"), (86_400_001, None)]
)
def test_times_lose_no_millisecond(unix_ms: int, text: str | None) -> None:
    assert timestamp(unix_ms) == (text or "1970-01-02 00:00:00.001")


def test_days_are_utc() -> None:
    assert day_of(1_796_083_199_999) == date(2026, 11, 30)
    assert day_of(1_796_083_200_000) == date(2026, 12, 1)


def test_a_token_names_the_bounds_whatever_their_order() -> None:
    one = Block(FINISHED, 5, date(2026, 1, 1), [Bounds(1, 0, 4), Bounds(0, 7, 9)])
    other = Block(FINISHED, 5, date(2026, 1, 1), [Bounds(0, 7, 9), Bounds(1, 0, 4)])
    assert one.token() == other.token() == "finished-5-0:7-9,1:0-4"


def test_settings_hide_the_password() -> None:
    env = {"KAFKA_BOOTSTRAP_SERVERS": "h:1", "CLICKHOUSE_URL": "http://u:s3cret@h:8123/numbers"}
    settings = SinkSettings.from_env(env)
    assert "s3cret" not in repr(settings)
    assert "h:8123/numbers" in repr(settings)
    for wrong in ("", "h:8123", "http://u:s3cret@h:8123"):
        with pytest.raises(SettingsError, match="CLICKHOUSE_URL=") as caught:
            SinkSettings.from_env(env | {"CLICKHOUSE_URL": wrong})
        assert "s3cret" not in str(caught.value)


@pytest.mark.real
def test_the_tables_have_these_columns(clickhouse: str) -> None:
    written = {table: columns(table) for table in TABLES.values()} | {"sink_progress": list(COLUMNS)}
    for kept, names in ("adapter", ADAPTER_COLUMNS), ("alias", ALIAS_COLUMNS), ("placement", PLACEMENT_COLUMNS):
        written[f"{kept}_rows"] = [*names, "written_ms", "gone"]
    with clickhouse_connect.get_client(dsn=clickhouse) as client:
        for table, names_ in written.items():
            assert [name for name, *_ in client.query(f"DESCRIBE {table}").result_rows] == names_
    assert columns("cache_events")[0] == "at"
    assert event(1).event == "load"
