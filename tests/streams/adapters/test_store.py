"""Both stores keep the same promises; the real S3 and the folder each have enemies of their own."""

import hashlib
import os
import socket
import threading
from pathlib import Path

import pytest

from infra.local.store import Store as EmbeddedStore
from streams.adapters.locations import Location, parse_location
from streams.adapters.store import Denied, NoFolder, NotFound, S3Settings, Store, TooLarge, Unavailable, open_store

DATA = os.urandom(3 << 20)
SHA256 = hashlib.sha256(DATA).hexdigest()


def s3(store: EmbeddedStore, **changes: str) -> S3Settings:
    told = {"endpoint_url": store.endpoint, "access_key": store.access_key, "secret_key": store.secret_key, **changes}
    return S3Settings(**told)


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.real)])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "file":
        root = tmp_path / "root"
        root.mkdir()
        return open_store(parse_location(f"file://{root}"), S3Settings())
    embedded = request.getfixturevalue("store")
    return open_store(parse_location(f"s3://adapters/{tmp_path.name}"), s3(embedded))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    return path


def _left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_put_is_got(opened: Store, file: Path, tmp_path: Path) -> None:
    there = opened.root.under("acme", "support", "7", "a.safetensors")
    opened.put(file, there, SHA256)
    assert opened.stat(there) == len(DATA)
    target = tmp_path / "got"
    fetched = opened.get(there, target, len(DATA))
    assert (fetched.size_bytes, fetched.sha256) == (len(DATA), SHA256)
    assert target.read_bytes() == DATA
    opened.put(file, there, SHA256)  # again is harmless


def test_an_empty_file(opened: Store, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    opened.put(empty, opened.root.under("e"), hashlib.sha256().hexdigest())
    assert opened.get(opened.root.under("e"), tmp_path / "got", 10).size_bytes == 0


def test_what_is_not_there(opened: Store, tmp_path: Path) -> None:
    for ask in (lambda at: opened.get(at, tmp_path / "got", 10), opened.stat):
        with pytest.raises(NotFound):
            ask(opened.root.under("nothing"))
    assert "got" not in _left(tmp_path)


def test_more_than_the_limit(opened: Store, file: Path, tmp_path: Path) -> None:
    there = opened.root.under("a")
    opened.put(file, there, SHA256)
    with pytest.raises(TooLarge, match="bytes"):
        opened.get(there, tmp_path / "got", len(DATA) - 1)
    assert not [name for name in _left(tmp_path) if "got" in name]


def test_outside_the_root(opened: Store, file: Path, tmp_path: Path) -> None:
    outside = Location(opened.root.scheme, opened.root.bucket, (*opened.root.segments[:-1], "data"))
    with pytest.raises(Denied):
        opened.get(outside, tmp_path / "got", 10)
    with pytest.raises(Denied):
        opened.put(file, outside, SHA256)
    with pytest.raises(Denied):
        opened.stat(outside)


@pytest.mark.real
def test_s3_says_what_is_wrong(store: EmbeddedStore, tmp_path: Path) -> None:
    there = parse_location("s3://adapters/x/y")
    for settings, error in (
        (s3(store, secret_key="wrong-secret"), Denied),
        (s3(store, access_key="nobody"), Denied),
        (s3(store, access_key="", secret_key=""), Denied),
        (s3(store, endpoint_url="http://127.0.0.1:9"), Unavailable),
    ):
        with pytest.raises(error) as told:
            open_store(parse_location("s3://adapters/x"), settings).get(there, tmp_path / "got", 10)
        assert store.secret_key not in str(told.value)
    nowhere = parse_location("s3://no-such-bucket/x")
    with pytest.raises(NotFound):
        open_store(parse_location("s3://no-such-bucket"), s3(store)).get(nowhere, tmp_path / "got", 10)
    assert not _left(tmp_path)


@pytest.mark.real
def test_s3_keeps_the_checksum(store: EmbeddedStore, file: Path) -> None:
    open_store(parse_location("s3://adapters/sum"), s3(store)).put(file, parse_location("s3://adapters/sum/a"), SHA256)
    told = store.client().stat_object("adapters", "sum/a").metadata
    assert told["x-amz-meta-sha256"] == SHA256


def test_settings_show_no_secret() -> None:
    assert "hidden" not in repr(S3Settings("http://x", "key", "hidden"))


@pytest.mark.parametrize("url", ["localhost:9000", "ftp://x", "http://x/path", "http://"])
def test_an_endpoint_that_is_none(url: str) -> None:
    with pytest.raises(ValueError, match="S3_ENDPOINT_URL"):
        open_store(parse_location("s3://adapters"), S3Settings(url))


class _Liar:
    """Answers every request with the bytes it is given, then hangs up."""

    def __init__(self, answer: bytes) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._answer = answer
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(self._answer)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nbut only this",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\nbut only this",
        b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 500 Oops\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\noops",
        b"HTTP/1.1 301 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_a_store_that_breaks_off_or_talks_nonsense(answer: bytes, tmp_path: Path) -> None:
    liar = _Liar(answer)
    try:
        opened = open_store(parse_location("s3://adapters"), S3Settings(liar.url, "key", "secret"))
        with pytest.raises(Unavailable):
            opened.get(parse_location("s3://adapters/a"), tmp_path / "got", 1_000)
    finally:
        liar.close()
    assert not _left(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Store, Path, Path]:
    """A folder store with a file in it, its path, and a secret beside it."""
    root = tmp_path / "root"
    (root / "in").mkdir(parents=True)
    (root / "in" / "a").write_bytes(b"good")
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "a").write_bytes(b"secret")
    return open_store(parse_location(f"file://{root}"), S3Settings()), root, secret


def test_no_link_is_followed(folder: tuple[Store, Path, Path], tmp_path: Path) -> None:
    opened, root, secret = folder
    (root / "file").symlink_to(secret / "a")
    (root / "dir").symlink_to(secret)
    (root / "inner").symlink_to(root / "in")
    (root / "in" / "b").symlink_to(root / "in" / "a")
    for segments in (("file",), ("dir", "a"), ("inner", "a"), ("in", "b")):
        with pytest.raises(Denied, match="link"):
            opened.get(opened.root.under(*segments), tmp_path / "got", 100)
    assert opened.get(opened.root.under("in", "a"), tmp_path / "got", 100).size_bytes == 4


def test_only_regular_files(folder: tuple[Store, Path, Path], tmp_path: Path) -> None:
    opened, root, _ = folder
    os.mkfifo(root / "pipe")
    for name in ("pipe", "in"):
        with pytest.raises(Denied, match="regular"):
            opened.get(opened.root.under(name), tmp_path / "got", 100)


def test_a_folder_that_is_gone_may_come_back(folder: tuple[Store, Path, Path], tmp_path: Path) -> None:
    opened, root, _ = folder
    root.rename(tmp_path / "away")
    with pytest.raises(NoFolder, match="there is no folder"):
        opened.get(opened.root.under("in", "a"), tmp_path / "got", 100)
    assert issubclass(NoFolder, Unavailable)


def test_the_local_disk_is_not_the_stores_fault(opened: Store, file: Path, tmp_path: Path) -> None:
    opened.put(file, opened.root.under("a"), SHA256)
    with pytest.raises(OSError):
        opened.get(opened.root.under("a"), tmp_path / "missing" / "got", len(DATA))
