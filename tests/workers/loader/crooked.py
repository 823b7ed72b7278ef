"""An S3 server of one object that does to each request what the test has written down for it."""

import re
import socket
import threading
import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Whole:
    """As it should be."""


@dataclass(frozen=True)
class Cut:
    """Breaks off after so many bytes of what it promised."""

    after: int


@dataclass(frozen=True)
class Away:
    """Says that it is overloaded."""


@dataclass(frozen=True)
class Hangs:
    """Takes the request and says nothing for a while."""

    seconds: float


@dataclass(frozen=True)
class Swapped:
    """Sends other bytes than the object's; `promised`: their number by its word, if that is another one."""

    data: bytes
    promised: int = -1


@dataclass(frozen=True)
class NoRanges:
    """Sends the whole, whatever part was asked for."""


Deed = Whole | Cut | Away | Hangs | Swapped | NoRanges


@dataclass
class Crooked:
    """`deeds`: for one request each; then `then`. `starts`: the first byte that each request asked for."""

    data: bytes
    deeds: list[Deed] = field(default_factory=list)
    then: Deed = field(default_factory=Whole)
    starts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                request = connection.recv(65536).decode()
                asked = re.search(r"(?i)^range: bytes=(\d+)-", request, re.MULTILINE)
                start = int(asked[1]) if asked else 0
                self.starts.append(start)
                self._answer(connection, self.deeds.pop(0) if self.deeds else self.then, start)

    def _answer(self, connection: socket.socket, deed: Deed, start: int) -> None:
        rest = self.data[start:]
        if start >= len(self.data):
            body = b"<Error><Code>InvalidRange</Code><Message>no such range</Message></Error>"
            head = f"HTTP/1.1 416 No\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
            connection.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
            return
        match deed:
            case Whole():
                _send(connection, start, len(rest), len(self.data), rest)
            case Cut(after):
                _send(connection, start, len(rest), len(self.data), rest[:after])
            case Away():
                connection.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            case Hangs(seconds):
                time.sleep(seconds)
            case Swapped(data, promised):
                _send(connection, 0, promised if promised >= 0 else len(data), len(data), data)
            case NoRanges():
                _send(connection, 0, len(self.data), len(self.data), self.data)


def _send(connection: socket.socket, start: int, length: int, total: int, data: bytes) -> None:
    status = f"206 Partial\r\nContent-Range: bytes {start}-{start + length - 1}/{total}" if start else "200 OK"
    head = f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    connection.sendall(head.encode() + data)
