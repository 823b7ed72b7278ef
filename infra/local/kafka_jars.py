"""The broker's jars and their class archive, kept once per user outside the checkout.

Maven fetches the jars that kafka_home/pom.xml names. The archive (class data sharing) is what the JVM writes when a
broker ends: with it a broker starts on 40 % of the CPU time. It is no more than a help: without one, or with one of
another Java, the JVM loads classes as ever.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path

from infra.local.child import ChildError
from infra.local.once import made_once
from infra.requires import missing
from streams.adapters.user_cache import cache_folder

VERSION = "4.3.1"
HOME = Path(__file__).with_name("kafka_home")
MAVEN_LIMIT_S = 300
# C1 alone: the second compiler costs more CPU than so small a broker ever earns back.
MEMORY = ("-Xms128m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


def jars() -> Path:
    """The folder of the jars, fetched the first time. Raises ChildError."""

    def fetch(folder: Path) -> None:
        if lines := missing("mvn"):
            raise ChildError(lines[0])
        copy = ("-DincludeScope=runtime", f"-DoutputDirectory={folder}", "dependency:copy-dependencies")
        run(["mvn", "-q", "-B", "-f", str(HOME / "pom.xml"), *copy], MAVEN_LIMIT_S, "fetching Apache Kafka with Maven")

    return made_once(cache_folder() / f"kafka-{VERSION}", fetch, lambda folder: any(folder.glob("kafka_*.jar")))


def make_archive(broker_life: Callable[[str], None]) -> None:
    """Once: calls `broker_life(option)`, which runs a broker to its end with that JVM option. Passes on its errors."""
    made_once(_archive().parent, lambda part: broker_life(f"-XX:ArchiveClassesAtExit={part / _archive().name}"))


def java(main_class: str, *arguments: str, options: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The command line of one of Kafka's programs. Raises ChildError, as jars() does."""
    if lines := missing("java"):
        raise ChildError(lines[0])
    libs, archive = jars(), _archive()
    shared = (f"-XX:SharedArchiveFile={archive}",) if archive.exists() and not options else ()
    log = f"-Dlog4j2.configurationFile={HOME / 'log4j2.yaml'}"
    return ("java", *MEMORY, *shared, *options, log, "-cp", f"{libs}/*", main_class, *arguments)


def run(argv: list[str] | tuple[str, ...], limit_s: float, doing: str) -> None:
    """Runs a program to its end. Raises ChildError with what it said."""
    try:
        subprocess.run(argv, capture_output=True, text=True, timeout=limit_s, check=True)
    except subprocess.TimeoutExpired:
        raise ChildError(f"{doing} took more than {limit_s:g} s") from None
    except subprocess.CalledProcessError as error:
        raise ChildError(f"{doing} failed:\n{(error.stdout + error.stderr).strip()}") from None


def _archive() -> Path:
    return cache_folder() / f"kafka-{VERSION}-classes" / "broker.jsa"
