"""Free ports on 127.0.0.1, remembered per home folder so that a restarted part is found where its clients know it.

Ports lie below the kernel's ephemeral range: while a server is down, a client that keeps connecting to a port inside
that range can be given that very port and connect to itself. port + 10000 is free as well: SeaweedFS listens there.

Between the choice of a port and its server's first listening lie seconds, in which another stack must not choose it:
a port is held by a file lock for as long as the process that chose it lives.
"""

import fcntl
import json
import os
import random
import socket
from pathlib import Path

from streams.adapters.user_cache import cache_folder

LOWEST, HIGHEST = 10_240, 22_767
SEAWEED_STEP = 10_000


def is_free(port: int) -> bool:
    """Whether 127.0.0.1:port can be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


_held: dict[int, Path] = {}  # port -> the ports file that it is held for


def hold(port: int, file: Path) -> bool:
    """Keeps the port from the user's other stacks until this process ends; False if one of them has it."""
    if port in _held:
        return _held[port] == file
    folder = cache_folder() / "ports"
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / str(port), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    _held[port] = file
    return True


def pick(taken: set[int]) -> int:
    """A port that is free now, with its neighbour 10000 above, and not in `taken`."""
    for _ in range(1000):
        port = random.randint(LOWEST, HIGHEST)
        if port not in taken and is_free(port) and is_free(port + SEAWEED_STEP):
            return port
    raise OSError(f"no free port on 127.0.0.1 between {LOWEST} and {HIGHEST}")


class Ports:
    """The ports of one home folder, by name, kept in `file`."""

    def __init__(self, file: Path) -> None:
        self._file = file.absolute()
        self._ports: dict[str, int] = json.loads(file.read_text()) if file.exists() else {}

    def allot(self, name: str, wanted: int | None = None) -> int:
        """The port kept under `name` if it is free now, else `wanted` if that is, else any free one; then kept."""
        kept = self._ports.get(name)
        port = next((p for p in (kept, wanted) if p is not None and is_free(p) and hold(p, self._file)), None)
        taken = set(self._ports.values())
        while port is None:
            picked = pick(taken)
            taken.add(picked)
            port = picked if hold(picked, self._file) else None
        if port != kept:
            self._ports[name] = port
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self._ports, indent=1) + "\n")
        return port
