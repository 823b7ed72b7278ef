"""How loaded each replica is: its last report plus own requests that the report does not cover yet. Pure.

A report says up to which offset of the replica's `requests` partition it has read. Own requests at or beyond that
offset, and those whose offset is not known yet, are added; nothing is counted twice and nothing is forgotten, however
late the reports are. Without this, every gateway would send its next burst to the replica that was idle a second ago.
"""

from dataclasses import dataclass, field

from schemas.tokens import LoadReport

Key = tuple[str, int]  # request id, attempt


@dataclass
class _Replica:
    incarnation: int
    report: LoadReport | None = None
    unread: dict[Key, tuple[int | None, int]] = field(default_factory=dict)  # key -> offset if known, cost in tokens


class LoadView:
    """Loads are in tokens still to be computed."""

    def __init__(self) -> None:
        self._replicas: dict[int, _Replica] = {}

    def _of(self, replica: int, incarnation: int) -> _Replica | None:
        """The replica's entry; a newer incarnation starts from nothing, an older one has none."""
        entry = self._replicas.get(replica)
        if entry is None or entry.incarnation < incarnation:
            entry = self._replicas[replica] = _Replica(incarnation)
        return entry if entry.incarnation == incarnation else None

    def reported(self, replica: int, incarnation: int, report: LoadReport) -> None:
        """A beat or token batch; one that is older than the last (they travel on two topics) changes nothing."""
        entry = self._of(replica, incarnation)
        if entry is None or (entry.report is not None and report.read_offset < entry.report.read_offset):
            return
        entry.report = report
        entry.unread = {k: v for k, v in entry.unread.items() if v[0] is None or v[0] >= report.read_offset}

    def sent(self, replica: int, incarnation: int, key: Key, cost: int) -> None:
        entry = self._of(replica, incarnation)
        if entry is not None:
            entry.unread[key] = (None, cost)

    def written(self, replica: int, incarnation: int, key: Key, offset: int) -> None:
        """The request's offset came with the broker's acknowledgement, perhaps after a report that covers it."""
        entry = self._of(replica, incarnation)
        if entry is None or key not in entry.unread:
            return
        if entry.report is not None and offset < entry.report.read_offset:
            del entry.unread[key]
        else:
            entry.unread[key] = (offset, entry.unread[key][1])

    def dropped(self, replica: int, incarnation: int, key: Key) -> None:
        """The attempt ended, was never written, or was answered: then a report that covers it is already here."""
        entry = self._replicas.get(replica)
        if entry is not None and entry.incarnation == incarnation:
            entry.unread.pop(key, None)

    def covers(self, replica: int, incarnation: int, offset: int) -> bool:
        """Whether the replica has said that it read this offset."""
        entry = self._replicas.get(replica)
        return (
            entry is not None
            and entry.incarnation == incarnation
            and entry.report is not None
            and offset < entry.report.read_offset
        )

    def replaced(self, replica: int, incarnation: int) -> bool:
        """Whether a newer holder of the place has been heard, on whichever topic it spoke first."""
        entry = self._replicas.get(replica)
        return entry is not None and entry.incarnation > incarnation

    def load(self, replica: int, incarnation: int) -> int:
        """Tokens still to be computed there, as far as this gateway can know."""
        entry = self._replicas.get(replica)
        if entry is None or entry.incarnation != incarnation:
            return 0
        reported = entry.report.tokens_in_flight if entry.report is not None else 0
        return reported + sum(cost for _, cost in entry.unread.values())
