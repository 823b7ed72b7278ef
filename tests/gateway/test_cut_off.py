"""A gateway that is cut off from the broker alone, and loses its place meanwhile."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from infra.local.kafka import Kafka
from schemas.stats import RequestFinished
from schemas.topics import FINISHED
from streams.bus.reader import Reader
from tests.gateway.rig import Rig, text_of, until
from tests.stack import Stack, started

pytestmark = pytest.mark.real


class SideDoor(Kafka):
    """A broker that whoever comes in by `side` is sent on to `road`."""

    def __init__(self, folder: Path, port: int, controller_port: int, side: int, road: int) -> None:
        super().__init__(folder, port, controller_port, folder.with_suffix(".log"))
        self._side, self._road = side, road

    def _properties(self, data: Path) -> Path:
        file = super()._properties(data)
        lines = []
        for line in file.read_text().splitlines():
            name = line.partition("=")[0]
            more = {
                "listeners": f",SIDE://127.0.0.1:{self._side}",
                "advertised.listeners": f",SIDE://127.0.0.1:{self._road}",
                "listener.security.protocol.map": ",SIDE:PLAINTEXT",
            }
            lines.append(line + more.get(name, ""))
        file.write_text("\n".join(lines) + "\n")
        return file


class Road:
    """Carries bytes to and fro, until it is closed: then they lie where they are."""

    def __init__(self, to: int) -> None:
        self._to = to
        self.open = asyncio.Event()
        self.open.set()

    @asynccontextmanager
    async def at(self, port: int) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._through, "127.0.0.1", port)
        yield
        server.close()

    async def _through(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
            await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await self.open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


async def test_it_reports_nothing_that_waited(model: Path, tmp_path: Path, stack: Stack) -> None:
    """Else a request that the reconciler has closed would be counted twice."""
    names = ("kafka", "controller", "side", "road")
    port, controller, side, road_port = (stack.ports.allot(f"cut-{name}") for name in names)
    service = SideDoor(tmp_path / "kafka", port, controller, side, road_port)
    broker = started(service)
    rig, far = (Rig(f"127.0.0.1:{at}", "", model, tmp_path / name) for at, name in ((port, "near"), (road_port, "far")))
    road = Road(side)
    try:
        await asyncio.to_thread(rig.prepare)
        async with road.at(road_port):
            old = far.gateway(stack.ports.allot("cut-old"), stack.ports.allot("cut-old-internal"))
            await asyncio.to_thread(rig.ready, old.child, rig.worker(WORKER_STEP_MS="20"))
            await asyncio.to_thread(old.sees, 1)
            streams = [asyncio.create_task(text_of(old, rig.model.name, f"{n}", 5000)) for n in range(4)]
            await until(lambda: old.rows() == 4, 20, "all run")
            rows: list[RequestFinished] = []
            async with Reader(rig.settings, {FINISHED: dict.fromkeys(range(8), "end")}, "rows") as reader:
                road.open.clear()
                streams[0].cancel()
                await asyncio.sleep(0.5)  # its row has left the queue, and is on the road
                new = rig.gateway(stack.ports.allot("cut-new"), stack.ports.allot("cut-new-internal"))
                for stream in streams:
                    stream.cancel()
                await asyncio.gather(*streams, return_exceptions=True)
                await asyncio.to_thread(rig.ready, new.child)
                road.open.set()
                await until(lambda: old.child.returncode() is not None, 40, "the old one's end")
                assert old.child.returncode() == 4
                assert await text_of(new, rig.model.name, "after", 9) == rig.answer("after", 9)
                while not any(row.output_tokens == 9 for row in rows):
                    rows += [r.value for r in await reader.poll() if isinstance(r.value, RequestFinished)]
        assert len(rows) <= 2, "the one on the road, and that of the last chat"
    finally:
        far.stop()
        rig.stop()
        broker.stop()
