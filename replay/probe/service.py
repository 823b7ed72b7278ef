"""`lorafleet probe`: beside the stack of a home, a round every few seconds, until it is told to end."""

import asyncio
import logging
import time
from pathlib import Path

import aiohttp
import click
import msgspec

from infra.flags import FAILED, NO_STACK, NOT_YET
from infra.upload import BadFolder
from replay.canaries import TrainingFailed
from replay.operator import OperatorError
from replay.probe.golden import RetiredCanary, goldens
from replay.probe.probe import Probe, Round
from replay.stage import Stage, StageError

AGAIN_S = 1.0  # to the next round where one settled nothing


async def run(home: Path, every_s: float | None, wants_json: bool) -> int:
    """None: one round. The command's exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        stage = Stage.running(home)
        async with stage.operator() as operator:
            known = await goldens(
                operator, stage.environment, home / "canaries", lambda text: click.echo(text, err=True)
            )
            async with Probe(stage.url, operator, stage.kafka, known) as probe:
                return await _rounds(probe, every_s, wants_json)
    except StageError as error:
        click.echo(str(error), err=True)
        return NO_STACK
    except (
        OperatorError, RetiredCanary, BadFolder, TrainingFailed, aiohttp.ClientError, OSError, TimeoutError,
    ) as error:  # fmt: skip
        click.echo(f"the probe could not begin: {error or type(error).__name__}", err=True)
        return FAILED


async def _rounds(probe: Probe, every_s: float | None, wants_json: bool) -> int:
    while True:
        began = time.monotonic()
        seen = await probe.round()
        click.echo(msgspec.json.encode(seen).decode() if wants_json else line(seen))
        if every_s is None:
            return FAILED if seen.wrong else NOT_YET if seen.unasked else 0
        pause_s = AGAIN_S if seen.again else every_s
        await asyncio.sleep(max(0.0, began + pause_s - time.monotonic()))


def line(seen: Round) -> str:
    """A round as people read it."""
    asked = seen.right + len(seen.wrong) + len(seen.unasked)
    told = [f"{seen.right} of {asked} right on replicas {seen.replicas} in {seen.took_ms} ms"]
    told += [f"WRONG replica {miss.replica} {miss.adapter_id} slot {miss.slot}: {miss.got!r}" for miss in seen.wrong]
    told += [f"could not ask replica {one.replica} {one.adapter_id}: {one.why}" for one in seen.unasked]
    told += [f"drained replica {replica}" for replica in seen.drained]
    told += [f"quarantined {adapter}" for adapter in seen.quarantined]
    return "; ".join([*told, *filter(None, (seen.told, seen.failed))])
