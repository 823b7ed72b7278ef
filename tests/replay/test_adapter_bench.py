"""The whole of `lorafleet bench adapters` on a tiny base: it runs to its end and prints what it promises."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from replay.adapter_bench.decode import PAUSES_S
from replay.adapter_bench.restart import PARTS
from replay.adapter_bench.steps import BRIEF_MS
from replay.adapter_bench.tiers import ADAPTERS, TIERS, VISITS

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
REGISTERED = 25


@pytest.fixture
def tiny(tmp_path: Path, model: Path) -> Path:
    """Random weights behind the real model's tokenizer and template."""
    folder = tmp_path / "tiny"
    told = json.loads((model / "config.json").read_text())
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=told["vocab_size"],
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=told["bos_token_id"],
        eos_token_id=told["eos_token_id"],
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for path in model.glob("token*"):
        shutil.copy(path, folder)
    return folder


def test_the_bench_of_adapters_runs_to_its_end(tiny: Path, tmp_path: Path) -> None:
    sizes = ("--registered", str(REGISTERED), "--rounds", "1", "--turns", "1", "--tokens", "16", "--restarts", "1")
    done = subprocess.run(
        [sys.executable, "-m", "infra", "bench", "adapters", "--json", *sizes],
        capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "LORAFLEET_MODEL": str(tiny), "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(told) == {"machine", "results"}
    (result,) = told["results"]
    assert [(step["adapter"], step["step"]) for step in result["steps"]] == [
        (adapter, step) for adapter in ("80 MB", "tiny") for step in BRIEF_MS
    ]
    assert result["steps"][0]["bytes"] > 79_953_920  # the brief's values in 16 bits, and a header
    assert all(step["ms"] > 0 and step["beside_ms"] > 0 and step["rounds"] == 1 for step in result["steps"])
    assert {row["tier"] for row in result["ttft"]} == set(TIERS)
    assert sum(row["requests"] for row in result["ttft"]) == 4 * VISITS
    assert [row["loads"] for row in result["decode"]] == list(PAUSES_S)
    assert [bool(row["loads_per_s"]) for row in result["decode"]] == [False, True, True]
    assert [row["number"] for row in result["registrations"]] == [ADAPTERS, REGISTERED]
    assert [row["customers"] for row in result["registrations"]] == [1, REGISTERED]
    assert [(row["part"], row["registered"]) for row in result["restarts"]] == [
        (part, number) for number in (ADAPTERS, ADAPTERS + REGISTERED) for part in PARTS
    ]
    assert [row["part"] for row in result["growth"]] == list(PARTS)
    assert not list(tmp_path.glob("lorafleet-bench-*"))
