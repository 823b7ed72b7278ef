"""Settings from the environment: refused by name, printed without secrets."""

from pathlib import Path

import pytest

from tests.workers.rig import model
from workers.settings import SettingsError, WorkerSettings


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {
        "KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1",
        "LORAFLEET_MODEL": str(model(tmp_path)),
        "LORAFLEET_STORE": "s3://adapters",
        "WORKER_REPLICA": "3",
        "AWS_SECRET_ACCESS_KEY": "very-secret",
        "KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
        "KAFKA_SASL_USERNAME": "worker",
        "KAFKA_SASL_PASSWORD": "very-secret",
    }


def test_settings_are_read_and_print_no_secret(env: dict[str, str]) -> None:
    settings = WorkerSettings.from_env({**env, "WORKER_TAKE_OVER": "1", "WORKER_KV_TOKENS": "4096"})
    assert (settings.replica, settings.take_over, settings.capacity_tokens) == (3, True, 8192)
    assert "very-secret" not in repr(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORKER_REPLICA", ""),
        ("WORKER_REPLICA", "64"),
        ("WORKER_ENGINE", "vllm"),
        ("WORKER_SLOTS", "0"),
        ("WORKER_MEMORY_BYTES", "28.4e9"),
        ("WORKER_KV_TOKENS", "31"),
        ("LORAFLEET_MAX_RANK", "513"),
        ("WORKER_TAKE_OVER", "yes"),
        ("WORKER_STEP_MS", "nan"),
        ("LORAFLEET_MODEL", "/nowhere"),
        ("LORAFLEET_STORE", "ftp://x"),
    ],
)
def test_a_bad_setting_is_refused_by_name(env: dict[str, str], name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}={value}"):
        WorkerSettings.from_env({**env, name: value})
