"""Which owners of an adapter have it in no slot yet. Pure."""

from collections.abc import Collection, Mapping

from streams.placement.rendezvous import OWNERS, ranked


def cold_owners(adapter_id: str, slots: Mapping[int, Collection[str]], owners: int = OWNERS) -> list[int]:
    """`slots`: the replicas that take work, and which adapters each has in its slots."""
    return [place for place in ranked(adapter_id, slots)[:owners] if adapter_id not in slots[place]]
