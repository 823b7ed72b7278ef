"""The adapters of `lorafleet bench adapters`: real ones of the base, and thousands of small ones of many customers.

Registered as pipelines do it, some at a time: by HTTP, out of files that lie where registrations may read. Small ones
have rank 1 on one matrix, and CUSTOMERS_ALIKE customers each upload the same bytes.
"""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import msgspec

from replay.operator import Operator
from replay.peft_adapters import write_random
from replay.stage import Stage
from schemas.adapters import RegisterAdapter
from streams.adapters.names import parse_adapter
from streams.adapters.shape import ModelShape

CUSTOMER = "bench"
AT_ONCE = 16
CUSTOMERS, CUSTOMERS_ALIKE = 500, 10
STRENGTH = 0.002  # of the real ones: what they say stays text, so that a token has its piece
T = TypeVar("T")
Told = Callable[[], None]


class Registrations(msgspec.Struct, frozen=True):
    """`number` adapters of `bytes` each (of the uploaded file), `at_once` registrations on their way at any time."""

    number: int
    bytes: int
    customers: int
    at_once: int
    seconds: float
    per_s: float


async def register_real(stage: Stage, number: int, told: Told) -> tuple[Registrations, list[str]]:
    """Rank 16 on all matrices of the served base, all different, of the customer CUSTOMER, whom they make."""
    shape = await asyncio.to_thread(ModelShape.of, stage.model)
    folder, commands = stage.home / "peft", []
    for at in range(number):
        adapter_id = f"{CUSTOMER}/real-{at}@1"
        await asyncio.to_thread(write_random, folder, shape, at, strength=STRENGTH)
        commands.append(await stage.upload(folder, adapter_id))
        told()
    size = (folder / "adapter_model.safetensors").stat().st_size
    shutil.rmtree(folder)
    async with stage.operator() as operator:
        await operator.add_customer(CUSTOMER)
        return await _register(operator, commands, size, told), [command.adapter_id for command in commands]


async def register_small(stage: Stage, number: int, told: Told) -> Registrations:
    """`told` is called once for each, when it is registered."""
    shape = await asyncio.to_thread(ModelShape.of, stage.model)
    folder, size, commands = stage.home / "peft", 0, []
    customers = [f"customer-{at}" for at in range(min(CUSTOMERS, number))]
    async with stage.operator() as operator:
        await _all(operator.add_customer(customer) for customer in customers)
        for first in range(0, number, CUSTOMERS_ALIKE):
            await asyncio.to_thread(write_random, folder, shape, first, rank=1, modules=("q",), layers=1)
            size = (folder / "adapter_model.safetensors").stat().st_size
            upload = await stage.upload(folder, f"{CUSTOMER}/small-{first}@1")
            for at in range(first, min(first + CUSTOMERS_ALIKE, number)):
                adapter_id = f"{customers[at % len(customers)]}/small-{at}@1"
                commands.append(msgspec.structs.replace(upload, adapter_id=adapter_id, command_id=f"small-{at}"))
        shutil.rmtree(folder)
        return await _register(operator, commands, size, told)


async def _register(operator: Operator, commands: list[RegisterAdapter], size: int, told: Told) -> Registrations:
    async def one(command: RegisterAdapter) -> None:
        await operator.register(command)
        told()

    began_s = time.perf_counter()
    await _all(one(command) for command in commands)
    took_s = time.perf_counter() - began_s
    customers = {parse_adapter(command.adapter_id).customer for command in commands}
    rate = round(len(commands) / took_s, 1)
    return Registrations(len(commands), size, len(customers), AT_ONCE, round(took_s, 1), rate)


async def _all(work: Iterable[Awaitable[None]]) -> None:
    """AT_ONCE of them at any time."""
    rest = iter(work)

    async def one_after_the_other() -> None:
        for each in rest:
            await each

    async with asyncio.TaskGroup() as group:
        for number in range(AT_ONCE):
            group.create_task(one_after_the_other(), name=f"registers {number}")
