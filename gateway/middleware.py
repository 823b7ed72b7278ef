"""Around every handler: a request id, and errors as the API has them, whatever went wrong."""

import logging
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.errors import ApiError
from gateway.metrics import Metrics

log = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("request_id", str)
STREAMING = web.RequestKey("streaming", bool)  # its headers have left: no other answer can follow
HTTP_REASONS = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 417: "expectation_failed"}


def answering(metrics: Metrics) -> Middleware:
    """The middleware of one port's application."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = uuid.uuid4().hex
        try:
            response = await handler(request)
        except ApiError as problem:
            response = error_answer(problem, metrics)
        except web.HTTPException as problem:
            response = error_answer(from_http(request, problem), metrics)
            if "Allow" in problem.headers:
                response.headers["Allow"] = problem.headers["Allow"]  # RFC 9110, 15.5.6
        except ConnectionError:
            raise  # the client went away while its body was read
        except Exception:
            log.exception("request %s: %s %s failed", request[REQUEST_ID], request.method, request.path)
            if request.get(STREAMING) and request.transport is not None:
                request.transport.abort()
                raise
            told = f"request {request[REQUEST_ID]} failed here: it is in our log"
            response = error_answer(ApiError("internal", told), metrics)
        if not response.prepared:
            response.headers.setdefault("x-request-id", request[REQUEST_ID])
        return response

    return middleware


def from_http(request: web.BaseRequest, problem: web.HTTPException) -> ApiError:
    """What aiohttp says by itself, in our words."""
    reason = HTTP_REASONS.get(problem.status, "invalid_request" if problem.status < 500 else "internal")
    if isinstance(problem, web.HTTPRequestEntityTooLarge):
        return ApiError(reason, f"the body is too large: {problem.text}")
    if isinstance(problem, web.HTTPExpectationFailed):
        return ApiError(reason, "Expect: only 100-continue is served", "Expect")
    return ApiError(reason, f"{request.method} {request.path}: {problem.reason}")


def error_answer(problem: ApiError, metrics: Metrics) -> web.Response:
    """The answer, counted."""
    metrics.refused(problem.reason)
    headers = {"Content-Type": "application/json"} | problem.headers()
    return web.Response(status=problem.status, body=problem.body(), headers=headers)


def json_answer(body: bytes, status: int = 200) -> web.Response:
    return web.Response(status=status, body=body, headers={"Content-Type": "application/json"})
