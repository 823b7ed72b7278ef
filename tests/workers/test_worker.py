"""The worker process, with the simulated engine, through the real broker."""

import pytest

from schemas.reasons import FinishReason, Tier
from schemas.tokens import Admitted
from tests.workers.rig import Rig, answer

pytestmark = pytest.mark.real


async def test_a_submit_is_admitted_and_streams_the_right_tokens(rig: Rig) -> None:
    incarnation = await rig.ready(rig.worker())
    await rig.submit("r1", [1, 2, 3], 50, incarnation)
    heard = await rig.finished("r1", FinishReason.LENGTH)
    assert heard.events[0] == Admitted("r1", 0, Tier.NONE)
    assert heard.ids == answer([1, 2, 3], 50)
    await rig.until(lambda: len(rig.rows) == 1)
    row = rig.rows[0]
    assert (row.request_id, row.output_tokens, row.reason) == ("r1", 50, FinishReason.LENGTH)
    assert 0 < row.first_token_ms <= row.total_ms
