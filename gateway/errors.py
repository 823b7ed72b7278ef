"""Why a request got no answer, and what its client is told: one table from reason to HTTP. Pure.

Every error body is OpenAI's: {"error": {"message", "type", "param", "code"}}, all four always there. Reasons are this
gateway's own, and the `finish` of an End (schemas/reasons.py, gateway/flights.py) when its outcome is not OK.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from schemas.adapters import Refusal

INVALID, AUTH, SERVER = "invalid_request_error", "permission_error", "server_error"


@dataclass(frozen=True)
class Shape:
    """`retry_after_s`: when trying again may help. None: it will not, and clients are told so."""

    status: int
    type: str
    code: str | None
    retry_after_s: int | None = None


REASONS: dict[str, Shape] = {
    # what the client can mend
    "invalid_request": Shape(400, INVALID, None),
    "context_length_exceeded": Shape(400, INVALID, "context_length_exceeded"),
    "too_long": Shape(400, INVALID, "context_length_exceeded"),
    "unauthorized": Shape(401, INVALID, "invalid_api_key"),
    "forbidden": Shape(403, AUTH, "key_not_allowed"),
    "origin_not_allowed": Shape(403, AUTH, "origin_not_allowed"),
    "not_found": Shape(404, INVALID, "not_found"),
    "model_not_found": Shape(404, INVALID, "model_not_found"),
    "retired": Shape(404, INVALID, "model_not_found"),
    "method_not_allowed": Shape(405, INVALID, "method_not_allowed"),
    "body_too_slow": Shape(408, INVALID, "body_too_slow"),
    "body_too_large": Shape(413, INVALID, "body_too_large"),
    "expectation_failed": Shape(417, INVALID, "expectation_failed"),
    "conflict": Shape(409, "conflict_error", "conflict"),
    "refused": Shape(422, INVALID, "registration_refused"),
    # what passes
    "too_many_in_flight": Shape(429, "requests", "rate_limit_exceeded", 1),
    "rate_limited": Shape(429, "requests", "rate_limit_exceeded", 1),
    "too_large_for_rate": Shape(429, "tokens", "rate_limit_exceeded"),
    "overloaded": Shape(429, "requests", "overloaded", 1),
    "no_replica": Shape(503, SERVER, "no_replica", 2),
    "broker": Shape(503, SERVER, "broker_unavailable", 2),
    "store": Shape(503, SERVER, "store_unavailable", 5),
    "starting": Shape(503, SERVER, "not_ready", 2),
    "unavailable": Shape(503, SERVER, "shutting_down", 1),
    "stopping": Shape(503, SERVER, "shutting_down", 1),
    "in_use": Shape(409, "conflict_error", "adapter_in_use"),
    "load_failed": Shape(503, SERVER, "adapter_load_failed", 5),
    "unknown_adapter": Shape(503, SERVER, "adapter_not_there_yet", 2),
    "draining": Shape(503, SERVER, "no_replica", 2),
    "stale": Shape(503, SERVER, "no_replica", 2),
    "gateway_lost": Shape(503, SERVER, "no_replica", 2),
    "deadline": Shape(504, "timeout_error", "deadline_exceeded", 1),
    "not_warm": Shape(503, SERVER, "adapter_not_warm", 5),
    "unconfirmed": Shape(504, "timeout_error", "not_confirmed_in_time", 1),
    # what does not
    "quarantined": Shape(503, SERVER, "adapter_quarantined"),
    "base_mismatch": Shape(503, SERVER, "base_model_mismatch"),
    "content_mismatch": Shape(500, SERVER, "adapter_content_mismatch"),
    "error": Shape(500, SERVER, "engine_error"),
    "redrives_used_up": Shape(500, SERVER, "attempts_used_up"),
    "internal": Shape(500, SERVER, "internal_error"),
}


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """`refusals`: every reason why a command was refused, of the internal API alone."""

    error: ErrorDetail
    refusals: Sequence[Refusal] = ()


class ApiError(Exception):
    """`reason` is a key of REASONS. `param` names the parameter of the request that it is about.

    `retry_after_s`: where it is known better than in the table.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        param: str | None = None,
        refusals: Sequence[Refusal] = (),
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason if reason in REASONS else "internal"
        self.message, self.param, self.refusals = message, param, refusals
        self.retry_after_s = self.shape.retry_after_s if retry_after_s is None else retry_after_s

    @property
    def shape(self) -> Shape:
        return REASONS[self.reason]

    @property
    def status(self) -> int:
        return self.shape.status

    def body(self) -> bytes:
        """The JSON body; also the payload of an error event in a stream."""
        shape = self.shape
        param = None if self.param is None else _text(self.param)
        detail = ErrorDetail(_text(self.message), shape.type, param, shape.code)
        return msgspec.json.encode(ErrorBody(detail, self.refusals))

    def headers(self) -> dict[str, str]:
        """Retry-After, or the word that a retry is pointless where clients would otherwise try."""
        if self.retry_after_s is not None:
            return {"Retry-After": str(self.retry_after_s)}
        return {"x-should-retry": "false"} if self.status >= 500 or self.status in (409, 429) else {}


def _text(told: str) -> str:
    """As it can be encoded: a header's bytes that are no UTF-8 come as lone surrogates."""
    return told.encode(errors="backslashreplace").decode()
