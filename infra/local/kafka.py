"""The embedded broker: the real Apache Kafka, one KRaft node on 127.0.0.1, as a child process.

Owns `folder`: data/ (the log), server.properties (written anew at each start) and lock, which the broker itself holds:
a second broker in a live folder would wreck the first. Acknowledged records survive kill -9 of the broker; the
advertised port has to stay the same while clients live, so the caller keeps it. `python -m infra.local.kafka` fetches
the jars.
"""

import base64
import os
import shutil
import socket
import struct
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from infra.local.child import Child, ChildError, Spec
from infra.local.kafka_jars import jars, java, make_archive, run
from infra.local.ports import Ports

FORMAT_LIMIT_S, SHORT_LIFE_LIMIT_S = 60, 60

PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={data}
auto.create.topics.enable=false
num.partitions=1
num.network.threads=2
num.io.threads=4
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
group.initial.rebalance.delay.ms=0
log.cleaner.dedupe.buffer.size=8388608
# A node that was killed waits until its own old registration has run out.
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=500
controller.quorum.election.timeout.ms=300
controller.quorum.election.backoff.max.ms=100
"""


class Kafka:
    """One broker in `folder`, for clients at 127.0.0.1:`port`."""

    name = "kafka"

    def __init__(self, folder: Path, port: int, controller_port: int, log: Path) -> None:
        self._folder = folder.absolute()
        self._port = port
        self._controller_port = controller_port
        self._log = log

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def address(self) -> str:
        return self.bootstrap

    def prepare(self, options: tuple[str, ...] = ()) -> Spec:
        """Fetches the jars and formats the folder where that was never done; blocks. Raises ChildError.

        `options` are further ones for the JVM.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        data = self._folder / "data"
        if not data.exists():
            # Formatted under another name, so that a folder half done is never started.
            temporary = self._folder / "data.part"
            shutil.rmtree(temporary, ignore_errors=True)
            arguments = ("format", "-t", _cluster_id(), "-c", str(self._properties(temporary)))
            run(java("kafka.tools.StorageTool", *arguments), FORMAT_LIMIT_S, "formatting Kafka's folder")
            temporary.rename(data)
        argv = java("kafka.Kafka", str(self._properties(data)), options=options)
        return Spec(self.name, argv, log=self._log, lock=self._folder / "lock", stop_s=15)

    def ready(self) -> bool:
        """Whether it answers a metadata request with itself as a broker."""
        try:
            return _brokers(self._port) > 0
        except OSError:
            return False

    def _properties(self, data: Path) -> Path:
        file = self._folder / "server.properties"
        file.write_text(PROPERTIES.format(port=self._port, controller_port=self._controller_port, data=data))
        return file


def fetch() -> None:
    """What a broker needs and every later one finds: jars, and the archive of a broker's classes. Raises ChildError."""
    jars()
    make_archive(_short_life)


def _short_life(option: str) -> None:
    with tempfile.TemporaryDirectory(prefix="lorafleet-kafka-") as name:
        folder = Path(name)
        ports = Ports(folder / "ports.json")
        broker = Kafka(folder / "kafka", ports.allot("kafka"), ports.allot("controller"), log=folder / "log")
        child = Child(replace(broker.prepare((option,)), stop_s=SHORT_LIFE_LIMIT_S))  # it writes the archive as it ends
        try:
            while child.returncode() is None and child.age_s < SHORT_LIFE_LIMIT_S and not broker.ready():
                time.sleep(0.1)
        finally:
            child.stop()


def main() -> int:
    try:
        fetch()
    except (ChildError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _cluster_id() -> str:
    """16 random bytes as Kafka writes them; its tools take a leading dash for an option."""
    while (text := base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")).startswith("-"):
        pass
    return text


def _brokers(port: int) -> int:
    """The number of brokers in the answer to a metadata request (version 1, no topics). Raises OSError."""
    client = b"lorafleet"
    body = struct.pack(">hhih", 3, 1, 0, len(client)) + client + struct.pack(">i", 0)
    with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        connection.sendall(struct.pack(">i", len(body)) + body)
        with connection.makefile("rb") as answer:
            head = answer.read(12)  # length, correlation id, number of brokers
    return int(struct.unpack(">iii", head)[2]) if len(head) == 12 else 0


if __name__ == "__main__":
    sys.exit(main())
