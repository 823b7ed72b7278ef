"""One program of a stack: how to run it, how to tell that it serves, where it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from infra.local.child import Child, Spec


@dataclass(frozen=True)
class Part:
    """`before` run to their end first, once. `prepare` may block and raises ChildError; it runs at every start.

    `again`, given the last life's exit code, is laid over the environment of every start but the first.
    """

    name: str
    prepare: Callable[[], Spec]
    ready: Callable[[Child], bool]
    address: str = ""
    before: tuple[Spec, ...] = ()
    again: Callable[[int], Mapping[str, str]] = lambda _: {}
    ready_limit_s: float = 60.0
