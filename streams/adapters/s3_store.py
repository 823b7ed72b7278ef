"""A store in an S3 bucket. Every call is bounded by time-outs and tried once: the caller knows whether to try again."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import urllib3
from minio import Minio
from minio.error import MinioException, S3Error

from streams.adapters.locations import Location
from streams.adapters.store import (
    Denied,
    Fetched,
    NotFound,
    S3Settings,
    StoreError,
    Stream,
    TooLarge,
    Unavailable,
    receive,
)

_CONNECT_S, _READ_S = 3, 15
_PART_BYTES = 16 << 20
_PIECE_BYTES = 64 << 10  # the most that is lost when an answer breaks off: what is read of a piece does not come
_PARTIAL = 206
_SHORTER = "InvalidRange"
_MISSING = {"NoSuchKey", "NoSuchBucket", "NoSuchObject", "ResourceNotFound"}
_DENIED = {"AccessDenied", "SignatureDoesNotMatch", "InvalidAccessKeyId", "AllAccessDisabled", "InvalidBucketName"}


class S3Store:
    """Objects below `root`. May be used by several threads at once."""

    def __init__(self, root: Location, settings: S3Settings) -> None:
        self.root = root
        endpoint = urlsplit(settings.endpoint_url or "https://s3.amazonaws.com")
        if endpoint.scheme not in ("http", "https") or not endpoint.netloc or endpoint.path not in ("", "/"):
            raise ValueError(f"S3_ENDPOINT_URL={settings.endpoint_url!r}: http://host:port or https://host is needed")
        self._client = Minio(
            endpoint.netloc,
            access_key=settings.access_key or None,
            secret_key=settings.secret_key or None,
            secure=endpoint.scheme == "https",
            region=settings.region,  # given, it saves a call per bucket
            http_client=urllib3.PoolManager(
                maxsize=8, timeout=urllib3.Timeout(connect=_CONNECT_S, read=_READ_S), retries=False
            ),
        )

    def get(self, location: Location, path: Path, limit_bytes: int) -> Fetched:
        with self.stream(location, limit_bytes) as stream:
            return receive(stream.chunks, path, limit_bytes)

    @contextlib.contextmanager
    def stream(self, location: Location, limit_bytes: int, start: int = 0) -> Iterator[Stream]:
        self._check(location)
        with _told(location):
            response = self._client.get_object(location.bucket, location.key, offset=start)
            try:
                begins = start if response.status == _PARTIAL else 0
                length = int(response.headers.get("content-length") or -1)
                if length > limit_bytes - begins:
                    raise TooLarge(f"{location}: {begins + length} bytes; at most {limit_bytes} are accepted")
                yield Stream(begins, _from_network(response.stream(_PIECE_BYTES)))
            finally:
                response.close()
                response.release_conn()

    def put(self, path: Path, location: Location, sha256: str) -> None:
        self._check(location)
        with _told(location), path.open("rb") as file:
            self._client.put_object(
                location.bucket,
                location.key,
                file,
                path.stat().st_size,
                metadata={"sha256": sha256},
                part_size=_PART_BYTES,
            )

    def stat(self, location: Location) -> int:
        self._check(location)
        with _told(location):
            return int(self._client.stat_object(location.bucket, location.key).size)

    def _check(self, location: Location) -> None:
        if location.within(self.root) is None:
            raise Denied(f"{location} is not below {self.root}")


class _Broken(Exception):
    """The network failed in the middle; told apart from a failing local disk."""


def _from_network(chunks: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from chunks
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise _Broken(type(error).__name__) from error


@contextlib.contextmanager
def _told(location: Location) -> Iterator[None]:
    """Turns what the client raises into a StoreError that names no host and no key."""
    try:
        yield
    except StoreError:
        raise
    except S3Error as error:
        if error.code in _MISSING:
            raise NotFound(f"{location}: there is no such object") from error
        if error.code in _DENIED:
            raise Denied(f"{location}: the store says {error.code}") from error
        if error.code == _SHORTER:
            raise StoreError(f"{location}: the object is shorter than what came of it before") from error
        raise Unavailable(f"{location}: the store says {error.code}") from error
    except ValueError as error:
        raise Denied(f"{location}: {error}") from error
    except (MinioException, urllib3.exceptions.HTTPError, _Broken) as error:
        raise Unavailable(f"{location}: the store does not answer as it should ({type(error).__name__})") from error
