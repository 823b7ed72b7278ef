"""The embedded store: real S3 with checked keys, alive after kill -9 with every acknowledged object, also elsewhere."""

import hashlib
import io
import stat
from pathlib import Path

import pytest
from minio import Minio
from minio.error import S3Error

from infra.local.ports import Ports
from infra.local.store import ADAPTERS, BUCKETS, UPLOADS, Store
from tests.stack import started

pytestmark = pytest.mark.real


def put(client: Minio, name: str, data: bytes) -> None:
    client.put_object(UPLOADS, name, io.BytesIO(data), len(data), metadata={"sha256": hashlib.sha256(data).hexdigest()})


def test_buckets_are_there_and_empty_of_the_ready_check(store: Store) -> None:
    client = store.client()
    assert {bucket.name for bucket in client.list_buckets()} == set(BUCKETS)
    assert ".ready" not in [found.object_name for found in client.list_objects(UPLOADS)]


def test_wrong_key_is_refused(store: Store) -> None:
    host = store.endpoint.removeprefix("http://")
    stranger = Minio(host, store.access_key, "wrong" * 5, secure=False, region="us-east-1")
    with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
        list(stranger.list_objects(ADAPTERS))


def test_killed_store_keeps_objects_even_on_other_ports(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    first = started(service := Store(folder, Ports(tmp_path / "a.json").allot, log=tmp_path / "log"))
    data = bytes(range(256)) * 20_000
    put(service.client(), "acme/one", data)
    first.kill()
    first.stop()
    second = started(moved := Store(folder, Ports(tmp_path / "b.json").allot, log=tmp_path / "log"))
    try:
        assert moved.endpoint != service.endpoint
        answer = moved.client().get_object(UPLOADS, "acme/one")
        assert answer.read() == data
        assert answer.headers["x-amz-meta-sha256"] == hashlib.sha256(data).hexdigest()
        answer.close()
        answer.release_conn()
    finally:
        second.stop()


def test_keys_are_the_owners_alone(tmp_path: Path) -> None:
    service = Store(tmp_path, Ports(tmp_path / "ports.json").allot, log=tmp_path / "log")
    spec = service.prepare()
    for name in ("access_key", "secret_key", "s3.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert not any(service.secret_key in argument for argument in spec.argv)
