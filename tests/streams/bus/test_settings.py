import ssl
from pathlib import Path

import pytest

from schemas.topics import ADAPTERS, REQUESTS, TOKENS
from streams.bus.errors import SettingsError
from streams.bus.settings import KafkaSettings

SASL = {
    "KAFKA_BOOTSTRAP_SERVERS": "a:1,b:2",
    "KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
    "KAFKA_SASL_MECHANISM": "SCRAM-SHA-256",
    "KAFKA_SASL_USERNAME": "fleet",
    "KAFKA_SASL_PASSWORD": "hunter2",
}


def test_a_plain_broker_needs_one_variable() -> None:
    settings = KafkaSettings.from_env({"KAFKA_BOOTSTRAP_SERVERS": "h:9092"})
    assert settings.client_kwargs()["ssl_context"] is None
    assert "sasl_mechanism" not in settings.client_kwargs()
    assert settings.faust_options() == {"broker": "kafka://h:9092"}
    assert (settings.partitions(REQUESTS), settings.partitions(TOKENS), settings.partitions(ADAPTERS)) == (64, 16, 8)


def test_sasl_and_tls_reach_aiokafka_and_faust() -> None:
    settings = KafkaSettings.from_env(SASL)
    kwargs = settings.client_kwargs()
    assert kwargs["sasl_mechanism"] == "SCRAM-SHA-256"
    assert (kwargs["sasl_plain_username"], kwargs["sasl_plain_password"]) == ("fleet", "hunter2")
    assert isinstance(kwargs["ssl_context"], ssl.SSLContext)
    options = settings.faust_options()
    assert options["broker"] == "kafka://a:1;kafka://b:2"
    credentials = options["broker_credentials"]
    assert (credentials.username, credentials.password) == ("fleet", "hunter2")
    assert credentials.protocol.value == "SASL_SSL"
    assert credentials.mechanism.value == "SCRAM-SHA-256"


def test_the_password_is_never_printed() -> None:
    settings = KafkaSettings.from_env(SASL)
    assert "hunter2" not in f"{settings} {settings!r}"
    assert "fleet" in repr(settings)


def test_a_namespace_stands_before_topic_names() -> None:
    settings = KafkaSettings.from_env({"KAFKA_BOOTSTRAP_SERVERS": "h:1", "LORAFLEET_NAMESPACE": "blue."})
    assert settings.topic_name(REQUESTS) == "blue.requests"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"KAFKA_BOOTSTRAP_SERVERS": ""}, "KAFKA_BOOTSTRAP_SERVERS"),
        ({"KAFKA_SECURITY_PROTOCOL": "TLS"}, "KAFKA_SECURITY_PROTOCOL=TLS"),
        ({"KAFKA_SASL_MECHANISM": "GSSAPI"}, "KAFKA_SASL_MECHANISM=GSSAPI"),
        ({"KAFKA_SASL_PASSWORD": ""}, "KAFKA_SASL_PASSWORD"),
        ({"KAFKA_SSL_CAFILE": "/none"}, "KAFKA_SSL_CAFILE=/none"),
        ({"LORAFLEET_REPLICA_PLACES": "0"}, "LORAFLEET_REPLICA_PLACES=0"),
        ({"LORAFLEET_GATEWAY_PLACES": "many"}, "LORAFLEET_GATEWAY_PLACES=many"),
    ],
)
def test_what_cannot_be_used_is_named(wrong: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        KafkaSettings.from_env(SASL | wrong)


def test_a_ca_file_is_loaded(tmp_path: Path) -> None:
    empty = tmp_path / "ca.pem"
    empty.write_text("")
    settings = KafkaSettings.from_env(SASL | {"KAFKA_SSL_CAFILE": str(empty)})
    with pytest.raises(ssl.SSLError):
        settings.ssl_context()
