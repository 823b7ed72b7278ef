"""`python -m workers.engine`: one engine for one worker, which listens on the socket and started this process."""

import argparse
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from schemas.engine import Event
from streams.adapters.base_model import base_hash
from streams.adapters.shape import ModelShape
from workers.engine.engine import Engine
from workers.engine.memory import Budget, base_bytes, fitted, kv_bytes, workspace_bytes
from workers.engine.process import connect, serve
from workers.engine.runner import Runner
from workers.engine.scheduler import Limits, Scheduler
from workers.engine.simulated import SimulatedRunner
from workers.engine.slots import Slots
from workers.slot_image import slot_pools

if TYPE_CHECKING:
    from workers.engine.operations import Operations  # brings torch, for which the simulated kind must not pay

VALUE_BYTES = 4  # of the KV cache, and of the base where nothing else is known


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    stream = connect(options.socket)

    def build(emit: Callable[[Event], None]) -> Engine:
        shape = ModelShape.of(options.model)
        limits = Limits(shape.vocab, shape.context, options.kv_tokens)
        pools = slot_pools(options.slots, options.max_rank, options.slot_pools)
        computing = _computing(options)
        if options.memory_bytes:
            pools = _fitted(options, shape, limits, pools, computing)
        runner = _runner(options, shape, pools, computing)
        slots = Slots(*pools.values())
        return Engine(Scheduler(limits, slots), slots, runner, emit, time.perf_counter)

    try:
        serve(stream, build, options.max_rank)
    except ConnectionError:
        return 0  # the worker is gone: nobody is left to serve
    except Exception:
        logging.exception("the engine stops")
        return 1
    return 0


def _computing(options: argparse.Namespace) -> "Operations | None":
    """What computes; None for the simulated kind."""
    if options.kind == "simulated":
        return None
    from workers.engine.torch_runner import operations

    return operations(options.threads)


def _fitted(
    options: argparse.Namespace,
    shape: ModelShape,
    limits: Limits,
    pools: dict[int, int],
    computing: "Operations | None",
) -> dict[int, int]:
    """As many slots as the device has memory for. Raises MemoryError."""
    from workers.engine.model_config import ModelConfig
    from workers.engine.weights import BaseWeights

    config = ModelConfig.of(options.model)
    value_bytes = VALUE_BYTES if computing is None else computing.value_bytes(BaseWeights(options.model).dtype)
    budget = Budget(
        total_bytes=options.memory_bytes,
        base_bytes=base_bytes(shape, config.tied, config.biased, value_bytes),
        kv_bytes=kv_bytes(shape.layers, shape.kv_heads, shape.head_dim, limits.kv_tokens, VALUE_BYTES),
        workspace_bytes=workspace_bytes(shape, limits),
    )
    found = fitted(budget, shape, pools)
    logging.info("memory: %s, slots by rank %s", budget, found)
    return found


def _runner(
    options: argparse.Namespace, shape: ModelShape, pools: dict[int, int], computing: "Operations | None"
) -> Runner:
    digest = base_hash(options.model)
    if computing is None:
        return SimulatedRunner(shape, digest, list(pools), options.step_ms, options.load_ms, options.model)
    from workers.engine.torch_runner import TorchRunner

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
    parser.add_argument(
        "--memory-bytes", type=int, default=0, help="the device's budget, which bounds the slots; 0: none"
    )
    parser.add_argument("--step-ms", type=float, default=0.0, help="simulated: what a step takes")
    parser.add_argument("--load-ms", type=float, default=0.0, help="simulated: what filling a slot takes")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
