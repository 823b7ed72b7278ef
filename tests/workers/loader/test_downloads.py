"""Downloads: bounded, gone on with where they broke off, tried again only where that can help."""

import asyncio

from streams.adapters.store import Unavailable
from tests.workers.loader.rig import Rig, once


async def test_downloads_are_bounded(rig: Rig) -> None:
    loader = await rig.loader()
    records = [rig.adapter(seed) for seed in range(8)]
    await asyncio.gather(*(once(loader, record) for record in records))
    assert rig.store.fetches == 8
    assert rig.store.most_together <= 2


async def test_a_store_that_is_away_for_a_moment_is_tried_again(rig: Rig) -> None:
    loader, record = await rig.loader(), rig.adapter(0)
    rig.store.failures = [Unavailable("away"), Unavailable("still")]
    await once(loader, record)
    assert rig.store.fetches == 3
    assert [event.event for event in rig.events] == ["load", "load"]
