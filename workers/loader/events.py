"""What is told of the disk and RAM tiers: one CacheEvent per load, eviction and failure. Owns nothing."""

import time
from collections.abc import Callable

from schemas.adapters import AdapterRecord
from schemas.reasons import Tier
from schemas.stats import CacheEvent


class Events:
    """`on_event` must not block; the events' time is left to it."""

    def __init__(self, on_event: Callable[[CacheEvent], None], replica: int, incarnation: int) -> None:
        self._on_event, self._replica, self._incarnation = on_event, replica, incarnation

    def loaded(self, record: AdapterRecord, tier: Tier, source: Tier, size_bytes: int, began_s: float) -> None:
        self._say(record.adapter_id, record.content_id, "load", tier, source, size_bytes, began_s, "")

    def failed(self, record: AdapterRecord, tier: Tier, source: Tier, began_s: float, reason: str) -> None:
        self._say(record.adapter_id, record.content_id, "fail", tier, source, 0, began_s, reason)

    def evicted(self, content_id: str, tier: Tier, size_bytes: int) -> None:
        self._say("", content_id, "evict", tier, Tier.NONE, size_bytes, time.monotonic(), "")

    def dropped(self, content_id: str, tier: Tier, reason: str) -> None:
        """What an earlier life left, and is not what it should be."""
        self._say("", content_id, "fail", tier, tier, 0, time.monotonic(), reason)

    def _say(
        self, adapter: str, content: str, event: str, tier: Tier, source: Tier, size: int, began_s: float, reason: str
    ) -> None:
        self._on_event(
            CacheEvent(
                at_unix_ms=0,
                replica=self._replica,
                incarnation=self._incarnation,
                adapter=adapter,
                content_id=content,
                event=event,
                tier=tier,
                source=source,
                bytes=size,
                duration_ms=round((time.monotonic() - began_s) * 1000, 3),
                reason=reason,
            )
        )
