"""The embedded broker: the real Apache Kafka, one KRaft node on 127.0.0.1, as a child process.

Owns `folder`: data/ (the log), server.properties (written anew at each start) and lock, which the broker itself holds:
a second broker in a live folder would wreck the first. The jars come from Maven once per user. Acknowledged records
survive kill -9 of the broker; the advertised port has to stay the same while clients live, so the caller keeps it.
"""

import base64
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

from infra.local.child import ChildError, Spec
from infra.local.once import made_once
from infra.requires import missing
from streams.adapters.user_cache import cache_folder

VERSION = "4.3.1"
HOME = Path(__file__).with_name("kafka_home")
MAVEN_LIMIT_S, FORMAT_LIMIT_S = 300, 60

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

    def prepare(self) -> Spec:
        """Fetches the jars and formats the folder where that was never done; blocks. Raises ChildError."""
        if lines := missing("java"):
            raise ChildError(lines[0])
        libs = jars()
        self._folder.mkdir(parents=True, exist_ok=True)
        data = self._folder / "data"
        if not data.exists():
            # Formatted under another name, so that a folder half done is never started.
            temporary = self._folder / "data.part"
            shutil.rmtree(temporary, ignore_errors=True)
            _run(
                [
                    *_java(libs),
                    "kafka.tools.StorageTool",
                    "format",
                    "-t",
                    _cluster_id(),
                    "-c",
                    str(self._properties(temporary)),
                ],
                FORMAT_LIMIT_S,
                "formatting Kafka's folder",
            )
            temporary.rename(data)
        memory = ("-Xms128m", "-Xmx256m", "-XX:+UseSerialGC")
        return Spec(
            self.name,
            (*_java(libs, *memory), "kafka.Kafka", str(self._properties(data))),
            log=self._log,
            lock=self._folder / "lock",
            stop_s=15,
        )

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


def jars() -> Path:
    """The folder of the broker's jars, fetched by Maven the first time. Raises ChildError."""

    def fetch(folder: Path) -> None:
        if lines := missing("mvn"):
            raise ChildError(lines[0])
        copy = ("-DincludeScope=runtime", f"-DoutputDirectory={folder}", "dependency:copy-dependencies")
        _run(["mvn", "-q", "-B", "-f", str(HOME / "pom.xml"), *copy], MAVEN_LIMIT_S, "fetching Apache Kafka with Maven")

    return made_once(cache_folder() / f"kafka-{VERSION}", fetch, lambda folder: any(folder.glob("kafka_*.jar")))


def main() -> int:
    """Fetches the jars."""
    try:
        jars()
    except (ChildError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _java(libs: Path, *options: str) -> list[str]:
    return ["java", *options, f"-Dlog4j2.configurationFile={HOME / 'log4j2.yaml'}", "-cp", f"{libs}/*"]


def _cluster_id() -> str:
    """16 random bytes as Kafka writes them; its tools take a leading dash for an option."""
    while (text := base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")).startswith("-"):
        pass
    return text


def _run(argv: list[str], limit_s: float, doing: str) -> None:
    try:
        subprocess.run(argv, capture_output=True, text=True, timeout=limit_s, check=True)
    except subprocess.TimeoutExpired:
        raise ChildError(f"{doing} took more than {limit_s:g} s") from None
    except subprocess.CalledProcessError as error:
        raise ChildError(f"{doing} failed:\n{(error.stdout + error.stderr).strip()}") from None


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
