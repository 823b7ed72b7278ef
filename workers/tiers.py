"""What a beat says of the tiers: bytes, leases, loads on their way, trouble. Owns the audit's clock alone."""

import asyncio
import time
from typing import NoReturn

from schemas.reasons import Tier
from schemas.replicas import TierReport
from workers import audit
from workers.loader.governor import Governor
from workers.loader.loader import Loader
from workers.loader.pulls import Pulls
from workers.loading import Loading

AUDIT_S = 2.0


class Tiers:
    """`incidents` also takes what steps.py finds in the engine's leases."""

    def __init__(self, loader: Loader, loading: Loading, pulls: Pulls, governor: Governor) -> None:
        self.incidents = audit.Incidents()
        self.slot_leases = self.kv_blocks = 0  # as of the engine's last word on them
        self._loader, self._loading, self._pulls, self._governor = loader, loading, pulls, governor

    async def audit(self) -> NoReturn:
        """Files; the engine's own leases come with its events."""
        while True:
            await asyncio.sleep(AUDIT_S)
            self.audit_files()

    def audit_files(self) -> None:
        live, loader = self._loader.live(), self._loader
        for tier, shelf in ((Tier.DISK, loader.disk), (Tier.RAM, loader.ram)):
            self.incidents.found(tier, audit.of_files(tier, shelf.leases(), live))

    def report(self) -> TierReport:
        disk, ram = self._loader.disk, self._loader.ram
        return TierReport(
            gpu_bytes=self._loading.residency.bytes,
            ram_bytes=ram.used_bytes,
            ram_limit_bytes=ram.budget_bytes,
            disk_bytes=disk.used_bytes,
            disk_limit_bytes=disk.budget_bytes,
            slot_leases=self.slot_leases,
            kv_blocks=self.kv_blocks,
            file_leases=sum(len(holders) for shelf in (disk, ram) for holders in shelf.leases().values()),
            loads=self._loader.on_their_way,
            missing=self._pulls.missing,
            thrashing=self._governor.thrashing(time.monotonic()),
            incidents=self.incidents.count,
            incident=self.incidents.last,
        )
