"""What an End that is no answer means to whoever asked: its reason in words, and the parameter that it is about."""

import logging

from gateway.catalogue import not_found, quarantined
from gateway.errors import ApiError
from gateway.flight import End

log = logging.getLogger(__name__)

TOLD: dict[str, tuple[str, str | None]] = {
    "too_long": ("the prompt and max_tokens do not fit the context: shorten the prompt or ask for less", "messages"),
    "overloaded": ("every replica is full: try again a little later", None),
    "no_replica": ("no replica is live: try again a little later", None),
    "draining": ("the replicas are being replaced: try again a little later", None),
    "stale": ("the replicas are being replaced: try again a little later", None),
    "gateway_lost": ("the replicas take this gateway for dead: try again a little later", None),
    "broker": ("the broker did not take the request: try again a little later", None),
    "unavailable": ("this gateway is shutting down: try again", None),
    "deadline": ("the request's time is over: ask for fewer tokens, or try again", None),
    "load_failed": ("the adapter could not be loaded: try again, and if that does not help tell the operator", "model"),
    "unknown_adapter": ("the replicas do not know the adapter yet: try again a little later", "model"),
    "base_mismatch": ("the replicas serve another base model than the adapter's: tell the operator", "model"),
    "content_mismatch": ("the replicas hold other content under the adapter's id: tell the operator", "model"),
    "error": ("the engine failed on this request", None),
    "redrives_used_up": ("every replica that worked on the request was lost", None),
}


def failure(end: End, model: str, request_id: str) -> ApiError:
    """What a client is told of a request that ended like this: the reason in this table's words.

    The end's own detail names replicas, files and machines: it goes into our log and into the request's row alone. But
    for a quarantine, where it is the adapter's row's word.
    """
    if end.finish == "retired":
        return not_found(model)
    if end.finish == "quarantined":
        return quarantined(model, end.detail, f" (request {request_id})")
    log.warning("request %s ended: %s: %s", request_id, end.finish, end.detail)
    message, param = TOLD.get(end.finish, ("the request failed", None))
    return ApiError(end.finish, f"{message} (request {request_id})", param)
