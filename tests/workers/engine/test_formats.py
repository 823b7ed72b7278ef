"""Outputs that are held to a JSON schema: by the real model and its adapters, in company, and begun anew."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import jsonschema
import numpy as np
import pytest

from schemas.engine import LoadSlot
from schemas.reasons import FinishReason
from schemas.requests import Sampling
from streams.adapters.shape import ModelShape
from streams.formats.grammars import Grammar, Grammars
from streams.formats.schema import ANY_OBJECT, FormatRefused
from tests.workers.engine.test_smollm2 import PROMPTS
from tests.workers.engine.tiny import KV_TOKENS, InProcess, adapter, image, start
from workers.engine.native import NativeOperations
from workers.engine.simulated import SimulatedRunner
from workers.engine.torch_runner import TorchRunner

pytestmark = pytest.mark.real
RANK, EOS = 16, 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "vip"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CHOICE = {"anyOf": [{"const": "yes"}, {"type": "integer", "minimum": 10, "maximum": 99}, {"type": "null"}]}
NESTED = {
    "type": "object",
    "properties": {"of": {"$ref": "#/$defs/leaf"}, "when": {"type": "string", "format": "date"}},
    "required": ["of", "when"],
    "additionalProperties": False,
    "$defs": {"leaf": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}},
}
SCHEMAS: list[dict[str, Any]] = [PERSON, CHOICE, NESTED]


@pytest.fixture(scope="module")
def runner(model: Path, native: NativeOperations) -> TorchRunner:
    return TorchRunner(model, "h", native, {RANK: 2}, KV_TOKENS)


@pytest.fixture(scope="module")
def grammars(model: Path) -> Grammars:
    return Grammars(model)


@pytest.fixture(scope="module")
def loads(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoadSlot]:
    folder, shape = tmp_path_factory.mktemp("images"), ModelShape.of(model)
    return [image(folder, shape, f"a{n}", adapter(shape, n, RANK, strength=0.04), RANK) for n in range(2)]


def held(schema: dict[str, Any], seed: int, **more: Any) -> Sampling:
    return Sampling(seed, json_schema=json.dumps(schema), **more)


def text_of(grammars: Grammars, ids: Sequence[int]) -> str:
    assert grammars._tokenizer is not None
    return grammars._tokenizer.decode_str(list(ids))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_output_fits_and_nobody_else_is_touched(
    runner: TorchRunner, grammars: Grammars, loads: list[LoadSlot], temperature: float
) -> None:
    grammars.load()
    wanted = [(schema, name) for schema in SCHEMAS for name in ("", "a0", "a1")]
    engine = InProcess(runner, 2).say(*loads)
    for seq, (schema, name) in enumerate(wanted):
        sampling = held(schema, seq, temperature=temperature, top_logprobs=2 if seq == 1 else None)
        engine.say(start(seq, PROMPTS[seq % 4], name, 120, sampling=sampling, stop_ids=[EOS]))
    free = range(100, 104)
    for seq in free:
        sampling = Sampling(seq, temperature=temperature)
        engine.say(start(seq, PROMPTS[seq % 4], ["", "a0"][seq % 2], 20, sampling=sampling, stop_ids=[EOS]))
    engine.run()
    assert max(step.rows for step in engine.steps()) == len(wanted) + len(free)
    for seq, (schema, _) in enumerate(wanted):
        ended, ids = engine.finished(seq), engine.tokens(seq)
        assert (ended.reason, ids[-1]) == (FinishReason.STOP, EOS), ended
        jsonschema.validate(json.loads(text_of(grammars, ids[:-1])), schema)
    for seq in free:
        alone = InProcess(runner, 2).say(*loads)
        sampling = Sampling(seq, temperature=temperature)
        alone.say(start(seq, PROMPTS[seq % 4], ["", "a0"][seq % 2], 20, sampling=sampling, stop_ids=[EOS]))
        assert alone.run().tokens(seq) == engine.tokens(seq)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_begun_anew_at_any_token_it_goes_on_as_it_would_have(runner: TorchRunner, temperature: float) -> None:
    sampling = held(PERSON, 5, temperature=temperature)
    whole = InProcess(runner, 2).say(start(0, PROMPTS[0], "", 120, sampling=sampling, stop_ids=[EOS])).run().tokens(0)
    for at in (1, 2, len(whole) // 2, len(whole) - 1):
        again = start(0, PROMPTS[0], "", 120, whole[:at], sampling, [EOS])
        assert InProcess(runner, 2).say(again).run().tokens(0) == whole[at:]


def test_preempted_it_goes_on_as_it_would_have(runner: TorchRunner) -> None:
    def starts() -> list[Any]:
        kinds = [held(SCHEMAS[seq % 2 * 2], seq, temperature=1.0) for seq in range(6)]
        return [start(seq, PROMPTS[3], "", 60, sampling=kind, stop_ids=[EOS]) for seq, kind in enumerate(kinds)]

    roomy, tight = InProcess(runner, 2).say(*starts()).run(), InProcess(runner, 2, 288).say(*starts())
    tight.run()
    joined = [seq for step in tight.steps() for seq in step.joined]
    assert len(joined) > len(set(joined)), "nothing was preempted: the test shows nothing"
    assert [tight.tokens(seq) for seq in range(6)] == [roomy.tokens(seq) for seq in range(6)]


def test_biases_penalties_and_nuclei_choose_among_what_fits(runner: TorchRunner, grammars: Grammars) -> None:
    grammars.load()
    digits = {"type": "string", "pattern": "^[0-9]{3,6}$"}
    more: list[dict[str, Any]] = [
        {"logit_bias": {EOS: 100.0}},
        {"logit_bias": {EOS: -100.0}},
        {"top_k": 3, "temperature": 2.0},
        {"top_p": 0.3, "temperature": 2.0},
        {"min_p": 0.2, "temperature": 1.0},
        {"presence_penalty": 2.0, "repetition_penalty": 5.0},
    ]
    engine = InProcess(runner, 2)
    for seq, one in enumerate(more):
        engine.say(start(seq, PROMPTS[0], "", 30, sampling=held(digits, seq, **one), stop_ids=[EOS]))
    engine.run()
    for seq in range(len(more)):
        assert engine.finished(seq).reason is FinishReason.STOP
        jsonschema.validate(json.loads(text_of(grammars, engine.tokens(seq)[:-1])), digits)


def test_an_output_that_max_tokens_cuts_off_says_so(runner: TorchRunner) -> None:
    engine = InProcess(runner, 2).say(start(0, PROMPTS[0], "", 3, sampling=held(PERSON, 0), stop_ids=[EOS])).run()
    assert (engine.finished(0).reason, engine.finished(0).length) == (FinishReason.LENGTH, 3)


@pytest.mark.parametrize(
    ("schema", "generated", "stop_ids", "word"),
    [
        ({"type": "strnig"}, [], [EOS], "response_format: .*strnig"),
        (PERSON, [30], [EOS], "response_format: the output so far does not fit"),
        (PERSON, [], [], "json_schema: .* needs stop_ids"),
        ({"enum": ["x" * 33_000]}, [], [EOS], "json_schema: .* more than 32768"),
    ],
)
def test_what_cannot_be_held_ends_by_name_and_its_neighbour_goes_on(
    runner: TorchRunner, schema: dict[str, Any], generated: list[int], stop_ids: list[int], word: str
) -> None:
    engine = InProcess(runner, 2)
    engine.say(start(0, PROMPTS[0], "", 30, generated, held(schema, 0), stop_ids))
    engine.say(start(1, PROMPTS[1], "", 60, sampling=held(CHOICE, 1), stop_ids=[EOS])).run()
    assert engine.finished(0).reason is FinishReason.ERROR
    assert re.search(word, engine.finished(0).detail)
    assert engine.finished(1).reason is FinishReason.STOP


def test_a_grammar_that_takes_long_holds_nobody_up(runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, may = Grammars.start, Event()

    def slow(self: Grammars, schema: str) -> Grammar:
        may.wait()
        return begin(self, schema)

    monkeypatch.setattr(Grammars, "start", slow)
    engine = InProcess(runner, 2)
    engine.say(start(0, PROMPTS[0], "", 60, sampling=held(CHOICE, 1), stop_ids=[EOS]))
    engine.say(start(1, PROMPTS[1], "", 5))
    while engine.engine.step():
        pass
    assert engine.engine.preparing
    assert engine.finished(1).length == 5
    assert not [token for step in engine.steps() for token in step.tokens if token.seq == 0]
    may.set()
    assert engine.run().finished(0).reason is FinishReason.STOP


def test_the_simulated_engine_holds_its_outputs_too(model: Path, grammars: Grammars) -> None:
    grammars.load()
    shape = ModelShape.of(model)
    engine = InProcess(SimulatedRunner(shape, "h", [RANK], 0, 0, model), 2)
    for seq, schema in enumerate(SCHEMAS):
        engine.say(start(seq, [1, 2], "", 200, sampling=held(schema, seq), stop_ids=[EOS]))
    engine.run()
    for seq, schema in enumerate(SCHEMAS):
        assert engine.finished(seq).reason is FinishReason.STOP
        jsonschema.validate(json.loads(text_of(grammars, engine.tokens(seq)[:-1])), schema)


def test_a_simulated_engine_without_a_tokenizer_refuses_by_name(model: Path) -> None:
    engine = InProcess(SimulatedRunner(ModelShape.of(model), "h", [RANK], 0, 0), 2)
    engine.say(start(0, [1, 2], "", 200, sampling=held(PERSON, 0), stop_ids=[EOS])).run()
    assert engine.finished(0).detail == "response_format: this engine has no tokenizer"


@pytest.mark.parametrize("schema", [*SCHEMAS, {"type": "object"}, {}])
def test_what_is_allowed_follows_from_the_output_alone(grammars: Grammars, schema: dict[str, Any]) -> None:
    random = np.random.default_rng(1)
    walk, output = grammars.start(json.dumps(schema)), list[int]()
    others = [grammars.start(json.dumps(schema)) for _ in range(3)]  # ask now and then
    for at in range(60):
        allowed = walk.allowed(49152, [EOS])
        for stride, other in enumerate(others, 2):
            if at % stride == 0:
                other.take(output)
                assert (other.allowed(49152, [EOS]) == allowed).all()
        fresh = grammars.start(json.dumps(schema))
        fresh.take(output)
        assert (fresh.allowed(49152, [EOS]) == allowed).all()
        token = int(random.choice(allowed.nonzero()[0]))
        if token == EOS:
            return
        output.append(token)
        walk.take(output)


def test_the_end_comes_where_it_must_and_no_special_token_before(grammars: Grammars) -> None:
    grammar = grammars.start('{"enum": ["a"]}')
    specials = range(17)  # SmolLM2's
    text = [18, 81, 18]  # "a"
    for at, token in enumerate(text):
        allowed = grammar.allowed(49152, [EOS, 0])
        assert allowed[token]
        assert not allowed[list(specials)].any()
        grammar.take(text[: at + 1])
    assert grammar.allowed(49152, [EOS, 0]).nonzero()[0].tolist() == [0, EOS]


def test_any_object_is_one(grammars: Grammars) -> None:
    with pytest.raises(FormatRefused, match="does not fit"):
        grammars.start(ANY_OBJECT).take([75])  # [
