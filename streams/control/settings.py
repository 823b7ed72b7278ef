"""What the control process is told by its environment."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

from streams.adapters.locations import InvalidLocation, Location, parse_location
from streams.adapters.store import S3Settings
from streams.bus.errors import SettingsError
from streams.bus.settings import KafkaSettings

MAX_RANK = 16
FLIP_LIMIT_S = 30.0


class ControlSettings(msgspec.Struct, frozen=True):
    """`instance` tells control processes of one fleet apart, and is the same again after a restart."""

    kafka: KafkaSettings
    s3: S3Settings
    model: Path
    store: Location
    sources: str
    max_rank: int
    instance: int
    scratch: Path
    flip_limit_s: float = FLIP_LIMIT_S

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Raises SettingsError."""
        model = env.get("LORAFLEET_MODEL", "")
        if not (Path(model) / "config.json").is_file():
            raise SettingsError(f"LORAFLEET_MODEL={model!r}: name a Hugging Face folder with config.json")
        try:
            store = parse_location(env.get("LORAFLEET_STORE", ""))
        except InvalidLocation as error:
            raise SettingsError(f"LORAFLEET_STORE={error}") from None
        home = Path(env.get("LORAFLEET_HOME") or ".lorafleet").absolute()
        instance = _number(env, "CONTROL_INSTANCE", 0, 0)
        return cls(
            kafka=KafkaSettings.from_env(env),
            s3=S3Settings.from_env(env),
            model=Path(model),
            store=store,
            sources=env.get("LORAFLEET_SOURCES", ""),
            max_rank=_number(env, "LORAFLEET_MAX_RANK", MAX_RANK, 1),
            instance=instance,
            scratch=home / f"control-{instance}",
            flip_limit_s=_number(env, "CONTROL_FLIP_LIMIT_S", int(FLIP_LIMIT_S), 1),
        )


def _number(env: Mapping[str, str], name: str, default: int, least: int) -> int:
    text = env.get(name) or str(default)
    if not text.isdecimal() or int(text) < least or len(text) > 6:
        raise SettingsError(f"{name}={text!r} is no number from {least} on")
    return int(text)
