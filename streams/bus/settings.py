"""How to reach Kafka: one frozen struct, read from the environment, for aiokafka and Faust alike."""

import os
import ssl
from collections.abc import Mapping
from typing import Any, Self

import msgspec

from schemas.topics import GATEWAY_PLACES, REPLICA_PLACES, Topic
from streams.bus.errors import SettingsError

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
MAX_PLACES = 1024
REQUEST_TIMEOUT_MS = 5_000  # also the time to notice a broker that accepts and never answers
RETRY_BACKOFF_MS = 50
METADATA_MAX_AGE_MS = 30_000


class KafkaSettings(msgspec.Struct, frozen=True):
    """`replica_places`, `gateway_places`: partitions of the topics that have one per place.

    `namespace` stands before every topic's name, so that fleets can share a broker.
    """

    bootstrap_servers: str
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str = "PLAIN"
    sasl_username: str = ""
    sasl_password: str = ""
    ssl_cafile: str = ""
    namespace: str = ""
    replica_places: int = 64
    gateway_places: int = 16
    replication: int = 1

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Raises SettingsError."""
        protocol = _one_of(env, "KAFKA_SECURITY_PROTOCOL", "PLAINTEXT", PROTOCOLS)
        mechanism = _one_of(env, "KAFKA_SASL_MECHANISM", "PLAIN", MECHANISMS)
        servers = env.get("KAFKA_BOOTSTRAP_SERVERS", "")
        if not servers:
            raise SettingsError("KAFKA_BOOTSTRAP_SERVERS is not set: give host:port, or several with commas")
        username, password = env.get("KAFKA_SASL_USERNAME", ""), env.get("KAFKA_SASL_PASSWORD", "")
        if protocol.startswith("SASL") and not (username and password):
            raise SettingsError(
                f"KAFKA_SECURITY_PROTOCOL={protocol} needs KAFKA_SASL_USERNAME and KAFKA_SASL_PASSWORD: set both"
            )
        cafile = env.get("KAFKA_SSL_CAFILE", "")
        if cafile and not os.path.isfile(cafile):
            raise SettingsError(
                f"KAFKA_SSL_CAFILE={cafile} is not a file: name the CA certificates in PEM, or unset it"
            )
        return cls(
            bootstrap_servers=servers,
            security_protocol=protocol,
            sasl_mechanism=mechanism,
            sasl_username=username,
            sasl_password=password,
            ssl_cafile=cafile,
            namespace=env.get("LORAFLEET_NAMESPACE", ""),
            replica_places=_number(env, "LORAFLEET_REPLICA_PLACES", 64, MAX_PLACES),
            gateway_places=_number(env, "LORAFLEET_GATEWAY_PLACES", 16, MAX_PLACES),
            replication=_number(env, "LORAFLEET_REPLICATION", 1, 16),
        )

    def __repr__(self) -> str:
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        if self.sasl_password:
            fields["sasl_password"] = "***"
        return f"KafkaSettings({', '.join(f'{name}={value!r}' for name, value in fields.items())})"

    def topic_name(self, topic: Topic) -> str:
        """The topic's name on the broker."""
        return f"{self.namespace}{topic.name}"

    def partitions(self, topic: Topic) -> int:
        places = {REPLICA_PLACES: self.replica_places, GATEWAY_PLACES: self.gateway_places}
        return places.get(topic.partitions, topic.partitions)

    def ssl_context(self) -> ssl.SSLContext | None:
        """None unless the protocol uses TLS."""
        if "SSL" not in self.security_protocol:
            return None
        return ssl.create_default_context(cafile=self.ssl_cafile or None)

    def client_kwargs(self) -> dict[str, Any]:
        """What every aiokafka client takes."""
        kwargs: dict[str, Any] = {
            "bootstrap_servers": self.bootstrap_servers,
            "security_protocol": self.security_protocol,
            "ssl_context": self.ssl_context(),
            "request_timeout_ms": REQUEST_TIMEOUT_MS,
            "retry_backoff_ms": RETRY_BACKOFF_MS,
            "metadata_max_age_ms": METADATA_MAX_AGE_MS,
        }
        if self.security_protocol.startswith("SASL"):
            kwargs["sasl_mechanism"] = self.sasl_mechanism
            kwargs["sasl_plain_username"] = self.sasl_username
            kwargs["sasl_plain_password"] = self.sasl_password
        return kwargs

    def faust_options(self) -> dict[str, Any]:
        """`broker` and, unless plaintext, `broker_credentials` of a faust.App."""
        servers = ";".join(f"kafka://{server.strip()}" for server in self.bootstrap_servers.split(","))
        options: dict[str, Any] = {"broker": servers}
        if self.security_protocol == "PLAINTEXT":
            return options
        from faust.auth import SASLCredentials, SSLCredentials  # slow to import, and only the control plane needs it

        if self.security_protocol == "SSL":
            options["broker_credentials"] = SSLCredentials(context=self.ssl_context())
        else:
            options["broker_credentials"] = SASLCredentials(
                username=self.sasl_username,
                password=self.sasl_password,
                mechanism=self.sasl_mechanism,
                ssl_context=self.ssl_context(),
            )
        return options


def _one_of(env: Mapping[str, str], name: str, default: str, allowed: tuple[str, ...]) -> str:
    value = env.get(name, default)
    if value not in allowed:
        raise SettingsError(f"{name}={value} is unknown: give one of {', '.join(allowed)}")
    return value


def _number(env: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = env.get(name, str(default))
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise SettingsError(f"{name}={text} is not a number from 1 to {most}")
    return int(text)
