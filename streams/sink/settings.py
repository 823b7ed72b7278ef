"""The sink's settings."""

import os
from collections.abc import Mapping
from typing import Self
from urllib.parse import urlsplit

import msgspec

from streams.bus.errors import SettingsError
from streams.bus.settings import KafkaSettings


class SinkSettings(msgspec.Struct, frozen=True):
    """`clickhouse_url` holds a password."""

    kafka: KafkaSettings
    clickhouse_url: str

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Raises SettingsError."""
        url = env.get("CLICKHOUSE_URL", "")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not parts.path.strip("/"):
            shown = masked(url) if url else "(not set)"
            raise SettingsError(f"CLICKHOUSE_URL={shown}: give http://user:password@host:port/database")
        return cls(KafkaSettings.from_env(env), url)

    def __repr__(self) -> str:
        return f"SinkSettings(kafka={self.kafka!r}, clickhouse_url={masked(self.clickhouse_url)!r})"


def masked(url: str) -> str:
    """The URL without what stands before its host."""
    return url.rpartition("@")[2] if "@" in url else url
