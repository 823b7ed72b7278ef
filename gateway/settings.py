"""Everything a gateway can be told, from the environment, checked at start."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

from gateway.cors import ORIGIN
from gateway.tls import Tls
from streams.bus.errors import SettingsError
from streams.bus.settings import KafkaSettings
from streams.tracing import settings as tracing


class GatewaySettings(msgspec.Struct, frozen=True):
    """`place` is this gateway's partition of `tokens`. `take_over`: its former holder was seen to die.

    `request_limit_s`: how long a request may take, all attempts together. `drain_s`: how long a stopping gateway lets
    open requests go on. `tls`: of the public port; the internal one is plain, and at home on 127.0.0.1.
    `traces`: where spans go; empty: nowhere.
    """

    kafka: KafkaSettings
    model: Path
    model_name: str
    place: int
    take_over: bool
    host: str
    port: int
    internal_host: str
    internal_port: int
    request_limit_s: float
    drain_s: float
    tls: Tls | None
    cors_origins: frozenset[str]
    traces: str

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Raises SettingsError naming the variable, its value and what would be accepted."""
        kafka = KafkaSettings.from_env(env)
        model = env.get("LORAFLEET_MODEL", "")
        if not (Path(model) / "config.json").is_file():
            raise SettingsError(f"LORAFLEET_MODEL={model} is not a Hugging Face model folder: name one")
        model_name = env.get("LORAFLEET_MODEL_NAME", "")
        if "/" in model_name:
            raise SettingsError(f"LORAFLEET_MODEL_NAME={model_name} holds a slash: only adapters and aliases have one")
        take_over = env.get("GATEWAY_TAKE_OVER", "0")
        if take_over not in ("", "0", "1"):
            raise SettingsError(f"GATEWAY_TAKE_OVER={take_over} is unknown: give 0 or 1")
        host = env.get("GATEWAY_HOST", "127.0.0.1")
        return cls(
            kafka=kafka,
            model=Path(model),
            model_name=model_name,
            place=_whole(env, "GATEWAY_PLACE", 0, kafka.gateway_places - 1),
            take_over=take_over == "1",
            host=host,
            port=_whole(env, "GATEWAY_PORT", 8000, 65535),
            # Whoever can reach this port can try operator keys on it: apart from the public one unless asked for.
            internal_host=env.get("GATEWAY_INTERNAL_HOST", "127.0.0.1"),
            internal_port=_whole(env, "GATEWAY_INTERNAL_PORT", 8001, 65535),
            request_limit_s=_seconds(env, "GATEWAY_REQUEST_LIMIT_S", 120.0),
            drain_s=_seconds(env, "GATEWAY_DRAIN_S", 15.0),
            tls=Tls.from_env(env),
            cors_origins=_origins(env.get("GATEWAY_CORS_ORIGINS", "")),
            traces=tracing.endpoint(env),
        )


def _whole(env: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = env.get(name, str(default))
    if not (text.isascii() and text.isdecimal()) or int(text) > most:
        raise SettingsError(f"{name}={text} is not a whole number from 0 to {most}")
    return int(text)


def _origins(text: str) -> frozenset[str]:
    """`*` is none: whose pages may hold a key is worth a word for each."""
    found = [origin.strip() for origin in text.split(",")] if text.strip() else []
    for origin in found:
        if not ORIGIN.fullmatch(origin):
            raise SettingsError(
                f"GATEWAY_CORS_ORIGINS={origin} is no origin: give some like https://app.example.com, comma-separated, "
                "in lower case, each without a path and without *"
            )
    return frozenset(found)


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86_400:
        raise SettingsError(f"{name}={text} is not a number of seconds from 0 to 86400")
    return value
