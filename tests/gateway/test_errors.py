"""Every way a request can end has a row in the table, and every body has all four keys."""

import json

import pytest

from gateway.endings import TOLD, failure
from gateway.errors import REASONS, ApiError
from gateway.flight import End
from gateway.flights import ENDINGS
from gateway.registrar import REASONS as REASONS_OF_REFUSALS
from schemas.adapters import Refusal
from schemas.reasons import Outcome, RejectReason

# What gateway/flights.py gives as `finish` of an End that is not OK, besides the values of the enums.
FINISHES = ["broker", "no_replica", "overloaded", "deadline", "retired", "redrives_used_up"]
ENDS = [finish for outcome, finish in ENDINGS.values() if outcome is not Outcome.OK]


@pytest.mark.parametrize("finish", [*FINISHES, *ENDS, *RejectReason, Outcome.UNAVAILABLE])
def test_every_end_is_in_the_table(finish: str) -> None:
    assert finish in REASONS


@pytest.mark.parametrize("reason", REASONS)
def test_the_body_has_all_four_keys(reason: str) -> None:
    problem = ApiError(reason, "what happened", "name")
    assert set(json.loads(problem.body())["error"]) == {"message", "type", "param", "code"}
    assert 400 <= problem.status < 600
    # Whoever may come again is told when; who need not, and would, is told so.
    if problem.status in (409, 429) or problem.status >= 500:
        assert ("Retry-After" in problem.headers()) != ("x-should-retry" in problem.headers())


def test_an_unknown_reason_is_ours() -> None:
    assert ApiError("never heard of", "x").status == 500


def test_bytes_that_are_no_text_are_told_as_they_can_be() -> None:
    """A header's bytes, as HTTP gives them to us."""
    shown = b"\xff\xfe".decode(errors="surrogateescape")
    body = json.loads(ApiError("invalid_request", f"it is {shown}", shown).body())
    assert (body["error"]["message"], body["error"]["param"]) == ("it is \\udcff\\udcfe", "\\udcff\\udcfe")


def test_refusals_are_told() -> None:
    body = json.loads(ApiError("refused", "x", "rank", [Refusal("rank", "too high")]).body())
    assert body["refusals"] == [{"field": "rank", "message": "too high"}]


def test_retired_looks_like_what_is_not_there() -> None:
    problem = failure(End("r", Outcome.FAILED, "retired", "acme/a@1 is retired"), "acme/a@1", "r")
    assert (problem.status, problem.shape.code) == (404, "model_not_found")
    assert "retired" not in problem.message


def test_what_a_worker_says_of_its_files_stays_here() -> None:
    detail = "[Errno 5] Input/output error: '/srv/lorafleet/worker-1/adapters/ab12.safetensors'"
    for finish in sorted(set(TOLD) | {"never heard of"}):
        body = failure(End("r", Outcome.FAILED, finish, detail), "acme/a@1", "r17").body().decode()
        assert "/srv" not in body
        assert "Errno" not in body
        assert "r17" in body


def test_every_end_has_its_words() -> None:
    ends = {finish for outcome, finish in ENDINGS.values() if outcome is not Outcome.OK}
    ends |= {reason.value for reason in RejectReason} | {"no_replica", "broker", "redrives_used_up", "unavailable"}
    assert ends - {"retired", "quarantined"} <= set(TOLD) <= set(REASONS)


def test_what_the_registry_answers_is_passed_on() -> None:
    """503 among them: the store was away, nothing was decided, and the same command may come again.

    A version that did not get warm is known to have failed: over HTTP 503, for there 504 says that nobody can tell yet.
    """
    answers = {status: ApiError(reason, "x") for status, reason in REASONS_OF_REFUSALS.items()}
    assert {status: problem.status for status, problem in answers.items()} == {
        404: 404, 409: 409, 422: 422, 503: 503, 504: 503,
    }  # fmt: skip
    assert "Retry-After" in answers[503].headers()
