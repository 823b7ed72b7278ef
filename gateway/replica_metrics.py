"""What Prometheus is told of the replicas, out of their last beats. Labels: the replica's place, and the tier."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from schemas.reasons import Tier
from schemas.replicas import ReplicaBeat

TIERS = (Tier.GPU, Tier.RAM, Tier.DISK)


class ReplicaMetrics:
    """A collector for a registry. `beats`: of the replicas that live."""

    def __init__(self, beats: Callable[[], Iterable[ReplicaBeat]]) -> None:
        self._beats = beats

    def collect(self) -> Iterator[Metric]:
        families = self._families()
        for beat in self._beats():
            place, tiers, residency = str(beat.replica), beat.tiers, beat.residency
            held = {Tier.GPU: tiers.gpu_bytes, Tier.RAM: tiers.ram_bytes, Tier.DISK: tiers.disk_bytes}
            for tier in TIERS:
                families["thrashing"].add_metric([place, tier], float(tier in tiers.thrashing))
                families["tier_bytes"].add_metric([place, tier], held[tier])
            families["loads_per_min"].add_metric([place], residency.loads_per_min)
            families["evictions_per_min"].add_metric([place], residency.evictions_per_min)
            families["slot_leases"].add_metric([place], tiers.slot_leases)
            families["kv_blocks"].add_metric([place], tiers.kv_blocks)
            families["failed_loads"].add_metric([place], len(beat.failed_loads))
            families["lease_incidents"].add_metric([place], tiers.incidents)
        yield from families.values()

    def describe(self) -> Iterable[Metric]:
        return list(self._families().values())

    @staticmethod
    def _families() -> dict[str, GaugeMetricFamily]:
        return {
            name: GaugeMetricFamily(f"lorafleet_replica_{name}", about, labels=["replica", *more])
            for name, about, more in (
                ("thrashing", "1 if loads chase evictions in the tier.", ["tier"]),
                ("tier_bytes", "What the tier holds.", ["tier"]),
                ("loads_per_min", "Adapters loaded into slots in the last minute.", []),
                ("evictions_per_min", "Adapters evicted from slots in the last minute.", []),
                ("slot_leases", "Sequences that run with an adapter.", []),
                ("kv_blocks", "Blocks of the KV cache that sequences hold.", []),
                ("failed_loads", "Adapters whose last load failed, as far as they are remembered.", []),
                ("lease_incidents", "Leases without a holder, or rows without a lease, since its start.", []),
            )
        }
