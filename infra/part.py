"""One program of a stack: how to run it, how to tell that it serves, where it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from infra.local.child import Child, Spec


@dataclass(frozen=True)
class Part:
    """`before` run to their end first, once. `prepare` may block and raises ChildError; it runs at every start.

    `again` is laid over the environment of every start but the first, when the supervisor has seen the last one die.
    """

    name: str
    prepare: Callable[[], Spec]
    ready: Callable[[Child], bool]
    address: str = ""
    before: tuple[Spec, ...] = ()
    again: Mapping[str, str] = field(default_factory=dict)
    ready_limit_s: float = 60.0
