import logging

import pytest

import streams.bus


def test_a_flood_of_the_same_words_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    assert streams.bus.__doc__
    logger = logging.getLogger("aiokafka.made_up")
    for attempt in range(100):
        logger.error("no node %s: %s", attempt, OSError("refused"))
    logger.error("no node %s: %s", 7, OSError("wrong password"))
    logger.info("hello")
    assert not logging.getLogger("aiokafka").propagate
    assert [record.getMessage() for record in caplog.records if record.name == "streams.bus.client_log"] == [
        "aiokafka.made_up: no node 0: refused",
        "aiokafka.made_up: no node 7: wrong password",
    ]
