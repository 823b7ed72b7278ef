"""What the environment may say, and the one line for what it may not."""

from pathlib import Path

import pytest

from streams.bus.errors import SettingsError
from streams.control.settings import ControlSettings
from tests.streams.control.process import tiny_model


def env(folder: Path, **changes: str) -> dict[str, str]:
    return {
        "KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:9092",
        "LORAFLEET_MODEL": str(folder),
        "LORAFLEET_STORE": "s3://adapters/canonical",
        "AWS_SECRET_ACCESS_KEY": "hidden",
        **changes,
    }


def test_what_is_needed_is_enough(tmp_path: Path) -> None:
    settings = ControlSettings.from_env(env(tiny_model(tmp_path / "model")))
    assert str(settings.store) == "s3://adapters/canonical"
    assert (settings.max_rank, settings.instance) == (16, 0)
    assert settings.scratch.name == "control-0"
    assert "hidden" not in repr(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LORAFLEET_STORE", ""),
        ("LORAFLEET_STORE", "/data"),
        ("LORAFLEET_MODEL", ""),
        ("LORAFLEET_MODEL", "/nowhere"),
        ("LORAFLEET_MAX_RANK", "0"),
        ("LORAFLEET_MAX_RANK", "many"),
        ("CONTROL_INSTANCE", "-1"),
        ("KAFKA_BOOTSTRAP_SERVERS", ""),
    ],
)
def test_refused_by_name(tmp_path: Path, name: str, value: str) -> None:
    told = env(tiny_model(tmp_path / "model"), **{name: value})
    with pytest.raises(SettingsError, match=name):
        ControlSettings.from_env(told)
