"""Work on files in a pool of threads, from the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


async def in_thread(pool: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
    """Also when cancelled it returns only after the thread has: nobody may touch its files before."""
    running = asyncio.get_running_loop().run_in_executor(pool, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        if not running.cancelled():
            running.exception()
        raise
