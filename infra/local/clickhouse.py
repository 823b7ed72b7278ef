"""The embedded ClickHouse as a child: chdb_server.py on 127.0.0.1, its data and password in `folder`."""

import http.client
from pathlib import Path

from infra.local.child import Spec, python
from infra.local.secret import kept_secret

USER = "lorafleet"


class ClickHouse:
    """One engine in `folder`."""

    name = "clickhouse"

    def __init__(self, folder: Path, port: int, log: Path) -> None:
        self._folder = folder.absolute()
        self._port = port
        self._log = log
        self._password = kept_secret(self._folder / "password")

    def url(self, database: str) -> str:
        """With user and password: a secret."""
        return f"http://{USER}:{self._password}@127.0.0.1:{self._port}/{database}"

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def prepare(self) -> Spec:
        return Spec(
            self.name,
            python("infra.local.chdb_server", str(self._folder / "data"), str(self._port)),
            log=self._log,
            env={"CHDB_PASSWORD": self._password},
            lock=self._folder / "lock",
        )

    def ready(self) -> bool:
        """Whether it answers a ping; it listens only once the engine is open."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=1)
        try:
            connection.request("GET", "/ping")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()
