"""A clock that runs only while this reader can hear. Pure.

A broker that restarts must not look like a dead fleet, nor must a pause of this very process: silence is counted in
seconds during which the reader's own fetches succeeded, and not in the first GRACE_S after it could hear again, since
writers may reconnect later than readers.
"""

DEAF_S = 1.0  # no successful fetch for so long: this reader hears nothing. An idle fetch comes back within 0.25 s.
GRACE_S = 3.0
LONGEST_STEP_S = 0.5  # a longer gap between two ticks is a pause of this process, in which it heard nothing


class ListeningClock:
    """`now` is in seconds listened, from 0. Call `tick` a few times a second."""

    def __init__(self) -> None:
        self.now = 0.0
        self._last: float | None = None
        self._grace_until = 0.0
        self._hearing = False

    @property
    def hearing(self) -> bool:
        """Whether the last tick found the reader's fetches to succeed."""
        return self._hearing

    def tick(self, now: float, fetch_age_s: float) -> float:
        """`now`: monotonic seconds; `fetch_age_s`: since the last successful fetch, empty ones included."""
        last, self._last = self._last, now
        hearing = fetch_age_s <= DEAF_S
        if hearing and not self._hearing:
            self._grace_until = now + GRACE_S
        elif hearing and last is not None:
            if now - last > LONGEST_STEP_S:
                self._grace_until = now + GRACE_S
            elif now >= self._grace_until:
                self.now += now - last
        self._hearing = hearing
        return self.now
