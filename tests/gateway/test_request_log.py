"""What the gateway's log and metrics have of a request: its numbers, never its words nor its key."""

import json

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.rig import ACME, Door, Rig, text_of, until

pytestmark = pytest.mark.real


async def test_one_line_a_request_and_no_word_of_it(door: Door, fleet: Rig) -> None:
    secret = "the launch code is rosebud"
    answer = await text_of(door, fleet.model.name, secret, 12)
    log = fleet.folder / "gateway-0" / "log"

    def rows() -> list[dict[str, object]]:
        lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
        return [row for line in lines if (row := json.loads(line))["prompt_tokens"] == len(fleet.prompt(secret))]

    await until(lambda: len(rows()) == 1, 5, "its line")
    [row] = rows()
    assert (row["customer"], row["tier"], row["outcome"], row["output_tokens"]) == ("acme", "none", "ok", 12)
    text = log.read_text()
    assert "rosebud" not in text
    assert ACME not in text
    assert answer not in text


async def test_metrics_have_vllm_s_names_and_bounded_labels(door: Door, fleet: Rig) -> None:
    await text_of(door, fleet.model.name, "count me", 5)
    async with aiohttp.ClientSession() as session, session.get(f"{door.internal}/metrics") as answer:
        families = {family.name: family for family in text_string_to_metric_families(await answer.text())}
    for name in ("time_to_first_token_seconds", "time_per_output_token_seconds", "e2e_request_latency_seconds"):
        assert families[f"vllm:{name}"].type == "histogram"
    for name in ("prompt_tokens", "generation_tokens"):
        assert families[f"vllm:{name}"].samples[0].value > 0
    labels = {label for family in families.values() for sample in family.samples for label in sample.labels}
    assert labels <= {"le", "tier", "outcome", "reason", "replica"}
