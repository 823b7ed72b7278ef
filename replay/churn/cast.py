"""The files of a churn, each with a voice of its own: strong random adapters, and what each says, asked undisturbed.

They are registered for a customer of their own, who asks them; the customer whose versions change has identical bytes
under other names.
"""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from replay.operator import Operator
from replay.peft_adapters import write_random
from replay.stage import Stage
from replay.streams import PROMPTS, Script, Take, take_all
from schemas.adapters import RegisterAdapter
from streams.adapters.shape import ModelShape

CUSTOMER, RANK, STRENGTH = "oracle", 4, 0.2
ASKED = PROMPTS[:4]
AT_ONCE = 8


class Cast:
    """`commands[voice]` registers its file, under any id. `says[voice][prompt]` is the right answer."""

    def __init__(self, commands: list[RegisterAdapter], says: list[dict[str, Take]]) -> None:
        self.commands, self.says = commands, says

    def registration(self, voice: int, adapter_id: str) -> dict[str, object]:
        """The body that registers the voice as a version."""
        told = msgspec.to_builtins(self.commands[voice])
        told = {name: value for name, value in told.items() if name not in ("type", "command_id", "by")}
        return told | {"adapter_id": adapter_id, "version": int(adapter_id.rpartition("@")[2])}

    def heard(self, prompt: str, take: Take) -> int:
        """Whose answer it is; -1: nobody's."""
        return next((voice for voice, said in enumerate(self.says) if said[prompt].same_as(take)), -1)


async def rehearse(
    stage: Stage, operator: Operator, voices: int, tokens: int, told: Callable[[int, int], None]
) -> Cast:
    """`told(done, of)`. Raises ValueError if an answer is not whole, or two voices say the same."""
    shape = await asyncio.to_thread(ModelShape.of, stage.model)
    tenant = await operator.make_customer(CUSTOMER)
    commands = []
    for voice in range(voices):
        adapter_id = f"{CUSTOMER}/voice-{voice}@1"
        with tempfile.TemporaryDirectory() as folder:
            await asyncio.to_thread(write_random, Path(folder), shape, 5000 + voice, RANK, STRENGTH)
            commands.append(await stage.upload(Path(folder), adapter_id))
        await operator.register(commands[-1])
        told(voice + 1, 2 * voices)
    says: list[dict[str, Take]] = []
    for voice, command in enumerate(commands):
        takes = await take_all(stage.url, [Script(tenant.key, command.adapter_id, ask, tokens) for ask in ASKED])
        for take in takes:
            if not take.whole:
                raise ValueError(f"undisturbed {command.adapter_id}: {take.error or take.finish}")
        says.append({take.script.prompt: take for take in takes})
        told(voices + voice + 1, 2 * voices)
    for ask in ASKED:
        if len({said[ask].text for said in says}) < voices:
            raise ValueError(f"two of {voices} voices say the same to {ask!r}: the wrong one would not be seen")
    return Cast(commands, says)
