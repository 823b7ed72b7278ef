"""Our own processes as parts of a stack: control, sink and workers, which print `ready` when they serve; gateways."""

import http.client
import os
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path

from infra.local.child import Child, Spec, python
from infra.part import Part

WORKER_READY_S = 300.0  # a large base takes its time to load
YIELDED = (4, 5)  # exit codes of workers and gateways: replaced by a newer claim, place taken
WORKER_STOP_S, GATEWAY_STOP_S = 20.0, 30.0  # longer than they drain


def process(name: str, module: str, env: Mapping[str, str], logs: Path, stop_s: float = 10.0) -> Part:
    """A part that says itself when it is ready."""
    spec = Spec(name, python(module), log=logs / f"{name}.log", env=env, stop_s=stop_s)
    return Part(name, prepare=lambda: spec, ready=Child.said_ready)


def worker(place: int, replicas: int, env: Mapping[str, str], home: Path, take_over: bool) -> Part:
    """The replica at `place`. `take_over`: nobody else can hold the place, so that it need not wait for a silence."""
    name = f"worker-{place}"
    threads = max(1, (os.cpu_count() or 1) // replicas)
    own = {
        "WORKER_REPLICA": str(place),
        "WORKER_THREADS": os.environ.get("WORKER_THREADS", str(threads)),
        "WORKER_DATA": str(home / name),
        "WORKER_TAKE_OVER": "1" if take_over else "0",
    }
    spec = Spec(name, python("workers"), log=home / "logs" / f"{name}.log", env={**env, **own}, stop_s=WORKER_STOP_S)
    return Part(name, lambda: spec, Child.said_ready, again=_take_over("WORKER"), ready_limit_s=WORKER_READY_S)


def gateway(place: int, port: int, internal_port: int, env: Mapping[str, str], home: Path, take_over: bool) -> Part:
    """The gateway at `place`, on 127.0.0.1; with TLS where its own settings in our environment say so."""
    name = f"gateway-{place}"
    own = {
        "GATEWAY_PLACE": str(place),
        "GATEWAY_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "GATEWAY_INTERNAL_PORT": str(internal_port),
        "GATEWAY_TAKE_OVER": "1" if take_over else "0",
    }
    spec = Spec(name, python("gateway"), log=home / "logs" / f"{name}.log", env={**env, **own}, stop_s=GATEWAY_STOP_S)
    return Part(
        name,
        lambda: spec,
        # Its own word first: whoever else may listen on that port must not be taken for it.
        lambda child: child.said_ready() and _answers_ready(port),
        address=public_url(port),
        again=_take_over("GATEWAY"),
        ready_limit_s=WORKER_READY_S,
    )


def public_url(port: int) -> str:
    return f"{'https' if os.environ.get('GATEWAY_TLS_CERT') else 'http'}://127.0.0.1:{port}"


def _take_over(who: str) -> Callable[[int], Mapping[str, str]]:
    """Its death was seen here, so its place need not wait for a silence; unless it ended because another one has it."""
    return lambda died: {f"{who}_TAKE_OVER": "0" if died in YIELDED else "1"}


def _answers_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    if public_url(port).startswith("https"):  # for whichever names it is made: it is our own child that we ask
        anyone = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=2, context=anyone)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
