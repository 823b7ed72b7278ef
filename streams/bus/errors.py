"""What can go wrong between this process and Kafka.

BusError
  SettingsError       an environment variable that cannot be used
  TopicMismatch       a topic that exists, but otherwise than schemas/topics.py wants it
  OffsetLost          a position that the log no longer (or not yet) has
  BusUnavailable      Kafka did not answer in time
    NotWritten        a record that was surely not written, and never will be
    MaybeWritten      a record that may have been written, or may still be, for all that is known
"""


class BusError(Exception):
    """Any of the errors of this package."""


class SettingsError(BusError):
    """Names the variable, its value and what would be accepted."""


class TopicMismatch(BusError):
    """Names topic, setting, what was found and what was wanted; one line per mismatch."""


class OffsetLost(BusError):
    """`position` lies outside the log, which has [earliest, end). Its owner decides where to go on: Reader.seek."""

    def __init__(self, topic: str, partition: int, position: int, earliest: int, end: int) -> None:
        super().__init__(f"{topic}/{partition}: position {position} is outside the log, which has [{earliest}, {end})")
        self.topic = topic
        self.partition = partition
        self.position = position
        self.earliest = earliest
        self.end = end


class BusUnavailable(BusError):
    """Kafka is away or too slow. `written` is False (surely not) or None (unknown)."""

    written: bool | None = None


class NotWritten(BusUnavailable):
    written = False


class MaybeWritten(BusUnavailable):
    written = None
