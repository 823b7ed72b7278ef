"""The environment that every process of a stack is given: which services are one's own, where the embedded ones are."""

import os
from collections.abc import Mapping
from pathlib import Path

from infra.local.child import ChildError
from infra.local.clickhouse import ClickHouse
from infra.local.kafka import Kafka
from infra.local.store import ADAPTERS, REGION, UPLOADS, Store

DATABASE = "lorafleet"
# Handed on as they are.
NAMES = (
    "KAFKA_BOOTSTRAP_SERVERS", "KAFKA_SECURITY_PROTOCOL", "KAFKA_SASL_MECHANISM", "KAFKA_SASL_USERNAME",
    "KAFKA_SASL_PASSWORD", "KAFKA_SSL_CAFILE", "LORAFLEET_NAMESPACE", "LORAFLEET_REPLICA_PLACES",
    "LORAFLEET_GATEWAY_PLACES", "LORAFLEET_REPLICATION", "LORAFLEET_MAX_RANK", "CLICKHOUSE_URL", "S3_ENDPOINT_URL",
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION",
)  # fmt: skip


class Embedded:
    """The embedded services that are needed: None where the environment names one's own."""

    def __init__(self, kafka: Kafka | None, store: Store | None, clickhouse: ClickHouse | None) -> None:
        self.kafka, self.store, self.clickhouse = kafka, store, clickhouse


def own_kafka(env: Mapping[str, str] = os.environ) -> bool:
    return bool(env.get("KAFKA_BOOTSTRAP_SERVERS"))


def own_clickhouse(env: Mapping[str, str] = os.environ) -> bool:
    return bool(env.get("CLICKHOUSE_URL"))


def own_store(env: Mapping[str, str] = os.environ) -> bool:
    """Raises ChildError for an s3:// store without an endpoint."""
    store, endpoint = env.get("LORAFLEET_STORE", ""), env.get("S3_ENDPOINT_URL")
    if store.startswith("s3://") and not endpoint:
        raise ChildError(f"LORAFLEET_STORE={store} needs S3_ENDPOINT_URL: set it, or unset LORAFLEET_STORE")
    return bool(store or endpoint)


def fleet_env(home: Path, embedded: Embedded, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the stack's processes need to know of each other and of the services, complete. Holds secrets."""
    laid = {name: env[name] for name in NAMES if name in env}
    laid["LORAFLEET_HOME"] = str(home)
    if embedded.kafka:
        laid["KAFKA_BOOTSTRAP_SERVERS"] = embedded.kafka.bootstrap
        laid["KAFKA_SECURITY_PROTOCOL"] = "PLAINTEXT"
    if embedded.clickhouse:
        laid["CLICKHOUSE_URL"] = embedded.clickhouse.url(DATABASE)
    if embedded.store:
        laid["S3_ENDPOINT_URL"] = embedded.store.endpoint
        laid["AWS_ACCESS_KEY_ID"] = embedded.store.access_key
        laid["AWS_SECRET_ACCESS_KEY"] = embedded.store.secret_key
        laid["AWS_REGION"] = REGION
    store = env.get("LORAFLEET_STORE") or f"s3://{ADAPTERS}"
    uploads = f"s3://{UPLOADS}" if store.startswith("s3://") else (home / UPLOADS).as_uri()
    laid["LORAFLEET_STORE"] = store
    laid["LORAFLEET_SOURCES"] = env.get("LORAFLEET_SOURCES") or uploads
    return laid
