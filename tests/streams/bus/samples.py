"""Records for the tests of the bus: a batch of tokens is known by its incarnation."""

from schemas.tokens import LoadReport, TokenBatch


def batch(number: int) -> TokenBatch:
    return TokenBatch(
        replica=0,
        incarnation=number,
        gateway=0,
        gateway_incarnation=0,
        load=LoadReport(read_offset=0, running=0, waiting=0, tokens_in_flight=0),
        events=[],
    )
