"""Canary adapters: real LoRA adapters, in PEFT's format, that answer every prompt with their own marker.

A canary proves isolation: its marker in another customer's answer is a leak. Training on the real base model takes
seconds: rank 16 on all seven matrices of the upper half of the layers, until every prompt of a set it never saw is
answered with the marker and nothing else. A folder appears whole or not at all (written beside, then renamed), and one
that is there is kept.
"""

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F

from replay.prompts import TRAINED, UNSEEN

RANK = 16
LEARNING_RATE = 4e-3
BATCH = 2
CHECK_EVERY = 3
MOST_STEPS = 48
MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Canary(msgspec.Struct, frozen=True):
    """`adapter_id` is `customer/name@version`; `marker` is the whole of every answer."""

    adapter_id: str
    marker: str

    @property
    def folder(self) -> str:
        return self.adapter_id.replace("/", "--")


class TrainingFailed(Exception):
    """The adapter did not learn its marker within MOST_STEPS."""


def train(
    model_folder: Path, canaries: Sequence[Canary], out: Path, progress: Callable[[Canary, int, bool], None]
) -> list[Path]:
    """Trains those of `canaries` that `out` lacks; returns all their PEFT folders.

    `progress(canary, step, done)` is called at each step. Raises TrainingFailed.
    """
    folders = [out / canary.folder for canary in canaries]
    todo = [(c, f) for c, f in zip(canaries, folders, strict=True) if not _is_whole(f, c)]
    if not todo:
        return folders
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    layers = base.config.num_hidden_layers
    for canary, folder in todo:
        torch.manual_seed(0)
        config = LoraConfig(
            r=RANK,
            lora_alpha=2 * RANK,
            target_modules=MATRICES,
            layers_to_transform=list(range(layers // 2, layers)),
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # PEFT warns of a second adapter on one base: unload() below removes the first
            model = get_peft_model(base, config)
        _teach(model, tokenizer, canary, progress)
        _save(model, canary, folder)
        base = model.unload()
    return folders


def _teach(model: Any, tokenizer: Any, canary: Canary, progress: Callable[[Canary, int, bool], None]) -> None:
    answer = tokenizer(canary.marker, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    order = random.Random(0)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.95))
    pool: list[str] = []
    for step in range(1, MOST_STEPS + 1):
        if len(pool) < BATCH:
            pool += order.sample(TRAINED, len(TRAINED))
        logits = _answer_logits(model, tokenizer, [pool.pop() for _ in range(BATCH)], answer)
        loss = F.cross_entropy(logits.flatten(0, 1), torch.tensor(answer * BATCH))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        done = step % CHECK_EVERY == 0 and _knows(model, tokenizer, answer)
        progress(canary, step, done)
        if done:
            return
    raise TrainingFailed(f"{canary.adapter_id} did not learn {canary.marker!r} in {MOST_STEPS} steps")


def _knows(model: Any, tokenizer: Any, answer: list[int]) -> bool:
    """Whether greedy decoding answers every unseen prompt with `answer` (argmax at each position, given the others)."""
    with torch.no_grad():
        logits = _answer_logits(model, tokenizer, UNSEEN, answer)
    return bool((logits.argmax(-1) == torch.tensor(answer)).all())


def _answer_logits(model: Any, tokenizer: Any, prompts: Sequence[str], answer: list[int]) -> torch.Tensor:
    """Logits [prompts, len(answer), vocab] at the positions that predict `answer`."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        + answer
        for prompt in prompts
    ]
    width = max(map(len, texts))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    logits: torch.Tensor = model(input_ids=ids, attention_mask=mask, logits_to_keep=len(answer) + 1).logits
    return logits[:, :-1].float()


def _save(model: Any, canary: Canary, folder: Path) -> None:
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    (part / "canary.json").write_bytes(msgspec.json.encode(canary))
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def _is_whole(folder: Path, canary: Canary) -> bool:
    """Whether the folder holds this very canary."""
    try:
        return bool(json.loads((folder / "canary.json").read_bytes()) == msgspec.to_builtins(canary))
    except (OSError, ValueError):
        return False
