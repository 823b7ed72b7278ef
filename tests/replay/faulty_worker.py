"""The worker, whose engine does what FAULT_FILE says (faulty_engine.py). For tests alone: no worker has this in it."""

import sys
from pathlib import Path

import workers.__main__ as worker
from workers.engine_client import EngineClient


class FaultyClient(EngineClient):
    def _argv(self, path: Path) -> list[str]:
        argv = super()._argv(path)
        argv[argv.index("workers.engine")] = "tests.replay.faulty_engine"
        return argv


if __name__ == "__main__":
    worker.EngineClient = FaultyClient  # type: ignore[attr-defined]
    sys.exit(worker.main())
