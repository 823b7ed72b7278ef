"""Several outputs of one request, completions beside chat, scores and cached tokens: through real processes."""

from math import isclose, log

import openai
import pytest

from gateway.detokenizer import Detokenizer
from tests.gateway.rig import GLOBEX, Door, Rig
from tests.gateway.test_chat import messages
from workers.engine.simulated import simulated_token

pytestmark = pytest.mark.real


def completed(fleet: Rig, prompt: str | list[int], count: int) -> str:
    ids = fleet.model.vocabulary.encode(prompt) if isinstance(prompt, str) else prompt
    pieces = fleet.model.vocabulary.pieces
    return Detokenizer(pieces).push(simulated_token("", ids, position, len(pieces)) for position in range(count))


async def test_n_choices_are_one_answer(door: Door, fleet: Rig) -> None:
    async with door.client() as client:
        answer = await client.chat.completions.create(
            model=fleet.model.name, messages=messages("three"), max_tokens=30, n=3, temperature=0
        )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {fleet.answer("three", 30)}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(fleet.prompt("three")), 90)


async def test_n_choices_stream_side_by_side(door: Door, fleet: Rig) -> None:
    whole = fleet.answer("side by side", 60)
    stop = whole[30:34]
    async with door.client() as client:
        stream = await client.chat.completions.create(
            model=fleet.model.name, messages=messages("side by side"), max_tokens=60, n=2, stream=True, stop=stop
        )
        chunks = [chunk.choices[0] async for chunk in stream]
    for index in range(2):
        mine = [choice for choice in chunks if choice.index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in mine) == whole[: whole.index(stop)]
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["stop"]


async def test_each_choice_takes_a_place(door: Door, fleet: Rig) -> None:
    async with door.client(GLOBEX) as client:  # two at once
        with pytest.raises(openai.RateLimitError, match="2 outputs of this customer may be open"):
            await client.chat.completions.create(model=fleet.model.name, messages=messages("x"), n=3)
        answer = await client.chat.completions.create(model=fleet.model.name, messages=messages("x"), n=2, max_tokens=2)
    assert len(answer.choices) == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_completions(door: Door, fleet: Rig, stream: bool) -> None:
    prompts = ["Once upon a time", "The sea"]
    async with door.client() as client:
        if stream:
            chunks = await client.completions.create(model=fleet.model.name, prompt=prompts, max_tokens=20, stream=True)
            texts = ["", ""]
            async for chunk in chunks:
                assert (chunk.object, chunk.id[:5]) == ("text_completion", "cmpl-")
                texts[chunk.choices[0].index] += chunk.choices[0].text
        else:
            answer = await client.completions.create(model=fleet.model.name, prompt=prompts, max_tokens=20)
            texts = [choice.text for choice in answer.choices]
            assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert texts == [completed(fleet, prompt, 20) for prompt in prompts]


async def test_a_completion_of_token_ids(door: Door, fleet: Rig) -> None:
    ids = fleet.model.vocabulary.encode("by id")
    async with door.client() as client:
        answer = await client.completions.create(model=fleet.model.name, prompt=ids)
        with pytest.raises(openai.BadRequestError, match="prompt is 999999: give ids of tokens"):
            await client.completions.create(model=fleet.model.name, prompt=[999999])
        with pytest.raises(openai.BadRequestError, match="logit_bias is 999999: give ids of tokens"):
            await client.completions.create(model=fleet.model.name, prompt="x", logit_bias={"999999": 1})
        with pytest.raises(openai.BadRequestError, match=r"prompt: the prompt is .* tokens or more"):
            await client.completions.create(model=fleet.model.name, prompt=[5] * fleet.model.context)
    assert answer.choices[0].text == completed(fleet, ids, 16)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("stream", [True, False])
async def test_scores_go_with_their_text(door: Door, fleet: Rig, stream: bool) -> None:
    ids, pieces = fleet.ids("scores", 40), fleet.model.vocabulary.pieces
    asked = {"model": fleet.model.name, "messages": messages("scores"), "max_tokens": 40, "logprobs": True}
    async with door.client() as client:
        if stream:
            chunks = await client.chat.completions.create(**asked, top_logprobs=2, stream=True)  # type: ignore[call-overload]
            choices = [chunk.choices[0] async for chunk in chunks]
            scores = [one for c in choices if c.logprobs for one in c.logprobs.content]
        else:
            answer = await client.chat.completions.create(**asked, top_logprobs=2)  # type: ignore[call-overload]
            scores = answer.choices[0].logprobs.content
    assert [bytes(one.bytes) for one in scores] == [pieces[i] for i in ids]
    assert all(isclose(one.logprob, -log(2)) and len(one.top_logprobs) == 2 for one in scores)
    assert [one.top_logprobs[0].bytes for one in scores] == [one.bytes for one in scores]


async def test_scores_of_a_completion(door: Door, fleet: Rig) -> None:
    async with door.client() as client:
        answer = await client.completions.create(model=fleet.model.name, prompt="scores", max_tokens=10, logprobs=1)
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert scores.text_offset is not None
    assert len(scores.tokens) == len(scores.token_logprobs or []) == len(scores.top_logprobs or []) == 10
    assert scores.text_offset[:2] == [0, len(scores.tokens[0])]


async def test_usage_tells_what_the_cache_spared(door: Door, fleet: Rig) -> None:
    question = "a long question that fills some blocks " * 20
    async with door.client() as client:
        cached = []
        for _ in range(2):
            answer = await client.chat.completions.create(
                model=fleet.model.name, messages=messages(question), max_tokens=3
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
    prompt = len(fleet.prompt(question))
    assert cached[0] < prompt // 2
    assert prompt - 32 <= cached[1] < prompt  # whole blocks, and always one token is computed
