"""`python -m tests.gateway.attacks`: starts a broker, a gateway and a replica, attacks them, prints what each got.

Exit status 1 if one did not hold.
"""

import asyncio
import sys

from infra.local.model import packaged_model
from streams.adapters.base_model import base_hash
from tests.gateway.attacks import table, timing
from tests.gateway.attacks.target import Target
from tests.gateway.rig import Rig
from tests.stack import Stack


def main() -> int:
    model, stack = packaged_model(), Stack()
    base_hash(model)
    try:
        rig = Rig(stack.kafka().bootstrap, "attacks.", model, stack.home / "attacks")
        rig.prepare()
        try:
            door = rig.gateway(stack.ports.allot("public"), stack.ports.allot("internal"))
            rig.ready(door.child, rig.worker(WORKER_STEP_MS="2"))
            door.sees(1)
            target = Target(rig, door)
            asyncio.run(target.prepare())
            times = timing.measured(target)
            rows = asyncio.run(table.run(target))
        finally:
            rig.stop()
    finally:
        stack.close()
    print("\n".join([table.shown(rows), *times]))
    return 0 if all(row.held for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
