"""What aiokafka logs, once per kind and half minute: while a broker is away it says the same tens of times a second.

Its words matter: only they tell a refused password or certificate from a broker that is down.
"""

import logging
import time

REPEAT_S = 30.0

log = logging.getLogger(__name__)


class Sparing(logging.Handler):
    """Passes a message on unless one of the same template about the same error was, within REPEAT_S."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._passed_at: dict[tuple[str, ...], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        args = record.args if isinstance(record.args, tuple) else ()
        errors = [str(argument) for argument in args if isinstance(argument, Exception)]
        kind, now = (record.name, str(record.msg), *errors), time.monotonic()
        if now - self._passed_at.get(kind, -REPEAT_S) >= REPEAT_S:
            self._passed_at[kind] = now
            log.warning("%s: %s", record.name, record.getMessage())


def spare() -> None:
    """Call once."""
    logger = logging.getLogger("aiokafka")
    logger.propagate = False
    logger.addHandler(Sparing())
