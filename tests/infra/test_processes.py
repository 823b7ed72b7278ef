"""When a part counts as ready."""

import http.server
import threading
from pathlib import Path

from infra.local.child import Child, Spec, python
from infra.processes import gateway
from tests.stack import wait_until


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_somebody_elses_gateway_on_the_port_is_not_this_one(tmp_path: Path) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Ready) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        part = gateway(0, other.server_port, 1, {}, tmp_path, take_over=False)
        ours = Child(Spec("ours", python("timeit", "-n", "1", "-r", "1", "print('not yet')"), tmp_path / "ours"))
        said = Child(
            Spec("said", python("timeit", "-n", "1", "-r", "1", "print('ready gateway=0')"), tmp_path / "said")
        )
        try:
            wait_until(lambda: ours.returncode() is not None and said.returncode() is not None, 20, "their words")
            assert not part.ready(ours)
            assert part.ready(said)
        finally:
            other.shutdown()
            ours.stop()
            said.stop()
