"""The internal API of a home's gateways, with the operator's key. Blocks.

A call goes to the first gateway that takes the connection. A change carries an id of its own, so that trying it at the
next gateway moves nothing twice.
"""

import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from infra.operator_key import operator_key
from infra.state import read_state

LIMIT_S = 330.0  # longer than any call may wait; a registration reads the whole file


class NoStackError(Exception):
    """No gateway of this home is known, or none takes the connection."""


class Answer(NamedTuple):
    status: int
    body: dict[str, Any]


class InternalApi:
    """Raises NoStackError where the home has never had a stack."""

    def __init__(self, home: Path) -> None:
        state = read_state(home)
        if state is None or not state.internal_urls:
            raise NoStackError(f"no stack runs in {home}: lorafleet up")
        self._urls, self._key, self.environment = state.internal_urls, operator_key(home), state.environment

    def call(self, method: str, path: str, body: object = None) -> Answer:
        """What the API answered, whatever that is. Raises NoStackError."""
        headers = {"Authorization": f"Bearer {self._key}", "Idempotency-Key": uuid.uuid4().hex}
        data = None if body is None else msgspec.json.encode(body)
        why = ""
        for url in self._urls:
            request = urllib.request.Request(url + path, data, headers, method=method)
            try:
                with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                    return Answer(answer.status, msgspec.json.decode(answer.read()))
            except urllib.error.HTTPError as error:
                with error:
                    return Answer(error.code, msgspec.json.decode(error.read()))
            except OSError as error:
                why = f"{url}: {error}"
        raise NoStackError(f"no gateway answers: {why}")


def path_of(*parts: str) -> str:
    """Below /internal; names hold slashes and colons."""
    return "/internal/" + "/".join(quote(part, safe="") for part in parts)
