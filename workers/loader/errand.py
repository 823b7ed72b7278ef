"""Why an adapter is brought: for a request that waits, or ahead of all requests. Owns no state but its own haste.

What nobody waits for yet takes only room that costs nobody anything, slowly; from the moment a request joins it, it is
like any other. The loop hurries it, the thread that carries its bytes sees so.
"""

import threading
from collections.abc import Callable


class Errand:
    """`may_go`: which contents may be evicted for it while nobody waits for it."""

    def __init__(self, may_go: Callable[[str], bool] = lambda _: True, bytes_per_s: float = 0.0) -> None:
        self._may_go, self._bytes_per_s = may_go, bytes_per_s
        self._hurried = threading.Event()

    @property
    def urgent(self) -> bool:
        return self._hurried.is_set()

    def hurry(self) -> None:
        self._hurried.set()

    def may_go(self, content_id: str) -> bool:
        return self.urgent or self._may_go(content_id)

    def pace(self, size_bytes: int, took_s: float) -> None:
        """In a thread: waits until so many bytes may have come in all, unless it is urgent."""
        if self._bytes_per_s and (early_s := size_bytes / self._bytes_per_s - took_s) > 0:
            self._hurried.wait(early_s)
