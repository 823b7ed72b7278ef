"""Settings: one clear error, and no secret in what is printed."""

from pathlib import Path

import pytest

from gateway.settings import GatewaySettings
from streams.bus.errors import SettingsError


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "config.json").write_text("{}")
    return {"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:9092", "LORAFLEET_MODEL": str(tmp_path)}


def test_defaults(env: dict[str, str]) -> None:
    settings = GatewaySettings.from_env(env)
    assert (settings.place, settings.take_over, settings.internal_host, settings.request_limit_s) == (
        0, False, "127.0.0.1", 120.0,
    )  # fmt: skip


def test_secrets_are_masked(env: dict[str, str]) -> None:
    secret = {"KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT", "KAFKA_SASL_USERNAME": "u", "KAFKA_SASL_PASSWORD": "hunter2"}
    assert "hunter2" not in repr(GatewaySettings.from_env(env | secret))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LORAFLEET_MODEL", "/nowhere"),
        ("LORAFLEET_MODEL_NAME", "a/b"),
        ("GATEWAY_PLACE", "16"),
        ("GATEWAY_PLACE", "-1"),
        ("GATEWAY_PORT", "x"),
        ("GATEWAY_PORT", "70000"),
        ("GATEWAY_TAKE_OVER", "yes"),
        ("GATEWAY_REQUEST_LIMIT_S", "-3"),
        ("GATEWAY_DRAIN_S", "nan"),
    ],
)
def test_what_cannot_be_used_is_named(env: dict[str, str], name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}={value}"):
        GatewaySettings.from_env(env | {name: value})
