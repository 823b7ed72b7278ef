"""Where spans go: OpenTelemetry's variables, one clear error, and no password in what is printed."""

import pytest

from streams.bus.errors import SettingsError
from streams.tracing.settings import endpoint

URL = "http://127.0.0.1:4318"


def test_off_unless_an_endpoint_is_named() -> None:
    assert endpoint({}) == endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) == ""
    assert endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": URL}) == URL
    both = {"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://b/v1/traces"}
    assert endpoint(both) == "https://b/v1/traces"


def test_a_password_is_masked() -> None:
    assert endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:hunter2@collector:4318"}) == "http://***@collector:4318"
    with pytest.raises(SettingsError) as told:
        endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:hunter2@collector:port"})
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
@pytest.mark.parametrize("value", ["127.0.0.1:4318", "grpc://h:4317", "http://", "http://h:x", "http://h:70000", "x"])
def test_what_is_no_url_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}={value} is not a URL"):
        endpoint({name: value})


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_another_protocol_is_refused(name: str) -> None:
    for served in ("", "http/protobuf"):
        assert endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": URL, name: served}) == URL
    with pytest.raises(SettingsError, match=f"{name}=grpc"):
        endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": URL, name: "grpc"})
    assert endpoint({name: "grpc"}) == "", "nothing is exported: nothing is wrong"
