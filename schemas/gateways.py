"""The compacted table `gateways`: who holds each gateway place. Key: the place, as decimal text. See replicas.py."""

import msgspec


class GatewayClaim(msgspec.Struct, frozen=True, tag="claim"):
    """`tokens` is read from `start_offset` on. The record's own offset is the incarnation."""

    gateway: int
    nonce: str
    start_offset: int
    at_unix_ms: int


class GatewayBeat(msgspec.Struct, frozen=True, tag="beat"):
    """Once a second. `tables` says how far this gateway has applied each table: topic -> partition -> next offset."""

    gateway: int
    incarnation: int
    beat: int
    at_unix_ms: int
    tables: dict[str, dict[int, int]]
    gone: bool = False  # its last word


GatewayState = GatewayClaim | GatewayBeat
