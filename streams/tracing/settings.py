"""Whether spans are exported, by OpenTelemetry's own variables. Its SDK reads the rest of them itself."""

import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from streams.bus.errors import SettingsError

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SERVED = "http/protobuf"
_USER = re.compile(r"//[^/@]*@")


def endpoint(env: Mapping[str, str] = os.environ) -> str:
    """Where spans go, without the user and password in it; empty: nowhere. Raises SettingsError."""
    told_off = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or env.get("OTEL_TRACES_EXPORTER") == "none"
    name = next((name for name in ENDPOINTS if env.get(name)), None)
    if told_off or name is None:
        return ""
    for protocol in PROTOCOLS:
        if env.get(protocol, SERVED) not in ("", SERVED):
            raise SettingsError(f"{protocol}={env[protocol]} is not served: give {SERVED}, or unset it")
    shown = _USER.sub("//***@", env[name])
    try:
        url = urlsplit(env[name])
        good = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        good = False
    if not good:
        raise SettingsError(f"{name}={shown} is not a URL: give one like http://127.0.0.1:4318, or unset it")
    return shown
