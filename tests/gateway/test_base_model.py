"""The base model as the gateway reads it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.base_model import BaseModel
from gateway.flight import SendSubmit
from schemas.codec import encode
from schemas.requests import Sampling
from schemas.topics import REQUESTS
from streams.bus.writer import MAX_RECORD_BYTES
from streams.formats.schema import MAX_SCHEMA_BYTES
from streams.presence.holders import Lost
from tests.gateway.desk import Desk, ask, only, tokens

SCHEMA = "s" * MAX_SCHEMA_BYTES


@pytest.fixture
def long(model: Path, tmp_path: Path) -> BaseModel:
    """A model of a context of a million tokens."""
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    told = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 1_000_000}
    (tmp_path / "config.json").write_text(json.dumps(told))
    return BaseModel.load(tmp_path)


def test_the_longest_chat_can_be_begun_anew_at_its_end(long: BaseModel, desk: Desk) -> None:
    """With all that a request may have besides its text."""
    sampling = Sampling(1 << 62, 0.7, 0.9, 40, 0.1, 1.1, 0.5, 0.5, {100_000 + n: -99.5 for n in range(300)}, 20, SCHEMA)
    asked = replace(
        ask(),
        adapter=f"{'c' * 64}/{'a' * 128}@1",
        content_id="c" * 64,
        prompt=[4_000_000] * (long.context // 2),
        max_tokens=long.context - long.context // 2,
        sampling=sampling,
    )
    submit = desk.open(asked)
    desk.hear(submit, tokens(submit, 0, *[4_000_000] * (asked.max_tokens - 1)))
    again = only(desk.flights.lost([Lost(1, 101, "silent")], 1.0), SendSubmit).submit
    assert 0.95 * MAX_RECORD_BYTES < len(encode(REQUESTS, again)) < MAX_RECORD_BYTES


def test_a_shorter_context_is_the_models_own(model: Path) -> None:
    assert BaseModel.load(model).context == 8192
