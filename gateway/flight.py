"""One request in flight: what was asked, what came back, and which attempt is the one that counts. Pure."""

from dataclasses import dataclass, field
from enum import StrEnum

from gateway.sequencer import Sequencer
from schemas.reasons import Outcome, Tier
from schemas.requests import Cancel, Sampling, Submit
from schemas.tokens import Logprobs


@dataclass(frozen=True)
class Ask:
    """An accepted request after authentication, alias resolution and tokenization. Times are monotonic seconds."""

    request_id: str
    customer: str
    model: str  # as the client named it
    adapter: str  # adapter id, empty for the base model
    content_id: str
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop_ids: list[int]
    arrived_at: float
    deadline_at: float
    conversation: int = 0
    only_on: int | None = None  # the one replica that may answer, for whoever wants to know that one's answer


class Phase(StrEnum):
    """PARKED: no attempt is open, and a replica is awaited. WRITING: the Submit is on its way to the log."""

    PARKED = "parked"
    WRITING = "writing"
    WRITTEN = "written"
    ADMITTED = "admitted"
    ENDED = "ended"


@dataclass
class Flight:
    """The state that Flights moves. `ask` changes only when a retired adapter's alias is resolved anew."""

    ask: Ask
    attempt: int = -1
    phase: Phase = Phase.PARKED
    replica: int = -1
    incarnation: int = -1
    offset: int | None = None
    unanswered_since: float | None = None  # listening time since which a report covers the unanswered Submit
    output: Sequencer = field(default_factory=Sequencer)
    tier: Tier = Tier.NONE
    cached: int = 0  # of the prompt's tokens, found in the prefix cache by the attempt that gave the first token
    losses: int = 0  # attempts that were lost: at most MAX_REDRIVES are made good
    crashes: int = 0  # of these, with the engine's own word that it crashed
    waits: int = 0  # since an attempt last ran, refusals after which nothing was left but to wait
    again_at: float = 0.0  # while parked: not tried before then
    avoid: set[int] = field(default_factory=set)
    resolved_anew: bool = False

    @property
    def ran(self) -> bool:
        """Whether an attempt ran, or may have: its client may have seen tokens, and waits for the rest."""
        return bool(self.output.ids) or self.losses > 0

    @property
    def cost(self) -> int:
        """Tokens that a new attempt has to compute."""
        return len(self.ask.prompt) + self.ask.max_tokens


@dataclass(frozen=True)
class SendSubmit:
    """Write `submit` to its replica's partition, then tell Flights `written` or `unwritten`."""

    submit: Submit


@dataclass(frozen=True)
class SendCancel:
    """Write `cancel` to `replica`'s partition; if that fails, the deadline there does the rest."""

    replica: int
    cancel: Cancel


@dataclass(frozen=True)
class Deliver:
    """New tokens for the client, in order, each exactly once."""

    request_id: str
    ids: list[int]
    scores: list[Logprobs] = field(default_factory=list)  # one per id, where the request asks for them


@dataclass(frozen=True)
class End:
    """The last word on a request; `finish` is "stop" or "length" when outcome is OK, else the reason's name."""

    request_id: str
    outcome: Outcome
    finish: str
    detail: str = ""


Action = SendSubmit | SendCancel | Deliver | End
