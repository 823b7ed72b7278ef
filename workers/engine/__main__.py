"""`python -m workers.engine`: one engine for one worker, which listens on the socket and started this process."""

import argparse
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

from schemas.engine import Event
from streams.adapters.base_model import base_hash
from streams.adapters.shape import ModelShape
from workers.engine.engine import Engine
from workers.engine.process import connect, serve
from workers.engine.runner import Runner
from workers.engine.scheduler import Limits, Scheduler
from workers.engine.simulated import SimulatedRunner
from workers.engine.slots import Slots
from workers.slot_image import slot_pools


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    pools = slot_pools(options.slots, options.max_rank, options.slot_pools)
    stream = connect(options.socket)

    def build(emit: Callable[[Event], None]) -> Engine:
        runner = _runner(options, pools)
        slots = Slots(*pools.values())
        limits = Limits(runner.model.vocab_size, runner.model.context_length, options.kv_tokens)
        return Engine(Scheduler(limits, slots), slots, runner, emit, time.perf_counter)

    try:
        serve(stream, build, options.max_rank)
    except ConnectionError:
        return 0  # the worker is gone: nobody is left to serve
    except Exception:
        logging.exception("the engine stops")
        return 1
    return 0


def _runner(options: argparse.Namespace, pools: dict[int, int]) -> Runner:
    shape = ModelShape.of(options.model)
    digest = base_hash(options.model)
    if options.kind == "simulated":
        return SimulatedRunner(shape, digest, list(pools), options.step_ms, options.load_ms)
    # Imported here: the simulated kind must not pay for torch.
    from workers.engine.torch_runner import TorchRunner, operations

    computing = operations(options.threads)
    return TorchRunner(options.model, digest, computing, pools, options.kv_tokens)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers.engine", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="unix socket that the worker listens on")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder of the base model")
    parser.add_argument("--kind", choices=("torch", "simulated"), default="torch")
    parser.add_argument("--threads", type=int, default=1, help="threads of a step")
    parser.add_argument("--slots", type=int, default=8, help="adapters in slots, the base not counted")
    parser.add_argument("--max-rank", type=int, default=16, help="rank that a slot is sized for")
    parser.add_argument("--slot-pools", default="", help="rank:slots,... instead, the largest rank being --max-rank")
    parser.add_argument("--kv-tokens", type=int, default=16384, help="positions that the KV cache holds")
    parser.add_argument("--step-ms", type=float, default=0.0, help="simulated: what a step takes")
    parser.add_argument("--load-ms", type=float, default=0.0, help="simulated: what filling a slot takes")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
