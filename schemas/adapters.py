"""The life of an adapter: commands in, results out, and the two tables they decide.

An adapter is one immutable version, `customer/name@version`. An alias, `customer/name:label`, points at one.
Commands are keyed by customer id, so that one writer decides everything about one customer, in the log's order.

`by` of a command is the principal of the key that asked for it over HTTP. What is put on Kafka directly says nothing
and is `topic`: whoever may write there may claim anything, so it is the broker's permissions that speak for it.
"""

import msgspec

from schemas.reasons import AdapterStatus, EventKind

BY_TOPIC = "topic"


class RegisterAdapter(msgspec.Struct, frozen=True, tag="register", forbid_unknown_fields=True):
    """`weights_uri` names the safetensors file (s3://bucket/key or file:///path); adapter_config.json lies beside it.

    `checksum` is the sha256 of that file, in hex. rank, alpha and target_modules must agree with adapter_config.json.
    """

    command_id: str
    adapter_id: str
    version: int
    base_model_hash: str
    rank: int
    alpha: float
    target_modules: list[str]
    weights_uri: str
    checksum: str
    by: str = BY_TOPIC


class RetireAdapter(msgspec.Struct, frozen=True, tag="retire", forbid_unknown_fields=True):
    command_id: str
    adapter_id: str
    by: str = BY_TOPIC


class QuarantineAdapter(msgspec.Struct, frozen=True, tag="quarantine", forbid_unknown_fields=True):
    """Nobody is served by it until it is released. `why` is what its customer is told, no word of the inside."""

    command_id: str
    adapter_id: str
    why: str
    by: str = BY_TOPIC


class ReleaseAdapter(msgspec.Struct, frozen=True, tag="release", forbid_unknown_fields=True):
    command_id: str
    adapter_id: str
    by: str = BY_TOPIC


class SetAlias(msgspec.Struct, frozen=True, tag="alias", forbid_unknown_fields=True):
    """`share` below 1: this share of the alias' conversations goes to the adapter, as a trial; the rest stays."""

    command_id: str
    alias: str
    adapter_id: str
    by: str = BY_TOPIC
    share: float = 1.0


class RollbackAlias(msgspec.Struct, frozen=True, tag="rollback", forbid_unknown_fields=True):
    """Back to the record's previous adapter; a second one leads forward again. What is only tried is called off."""

    command_id: str
    alias: str
    by: str = BY_TOPIC


class PendingFlip(msgspec.Struct, frozen=True):
    """A move of an alias that waits for its adapter to be warm, until its deadline at most.

    `command` is its name, alias or rollback; (command_partition, command_offset) is where it stands in the log.
    """

    adapter_id: str
    command: str
    command_id: str
    by: str
    deadline_unix_ms: int
    command_partition: int
    command_offset: int
    share: float = 1.0


class Trial(msgspec.Struct, frozen=True):
    """A version beside the one that the alias points at: it serves `share` of the alias' conversations.

    `command_id` began it or gave it this share; `since_unix_ms` is when it began.
    """

    adapter_id: str
    share: float
    command_id: str
    by: str
    since_unix_ms: int


class EndTrial(msgspec.Struct, frozen=True, tag="end-trial", forbid_unknown_fields=True):
    """What the registry tells itself: a trial has failed. Nothing is done if `trial` is not the alias' any more."""

    command_id: str
    alias: str
    trial: Trial
    why: str
    by: str = BY_TOPIC


class ConcludeFlip(msgspec.Struct, frozen=True, tag="conclude", forbid_unknown_fields=True):
    """What the registry tells itself: the alias moves if `flip` is still what it waits for; if not `warm`, it stays."""

    command_id: str
    alias: str
    flip: PendingFlip
    warm: bool
    why: str
    by: str = BY_TOPIC


AliasCommand = SetAlias | RollbackAlias | ConcludeFlip | EndTrial
VersionCommand = RegisterAdapter | RetireAdapter | QuarantineAdapter | ReleaseAdapter
AdapterCommand = VersionCommand | AliasCommand


class Refusal(msgspec.Struct, frozen=True):
    """One reason: the field it is about, the value found, and what would be accepted."""

    field: str
    message: str


class CommandResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to one command, keyed by its id. Of an alias it says all of what stands behind it.

    status 200 (already so), 201 (created), 404, 409 (another content under this id) or 422 (with every reason). 202: an
    alias will move to `pending_adapter_id` when that is warm; a second result follows, 200, 409 (another command took
    its place) or 504 (it did not get warm in time), and the alias points at `adapter_id` meanwhile.
    `table`, `partition`, `offset`: the table record that this command wrote, so that a caller can wait until readers
    have passed it.
    """

    command_id: str
    status: int
    adapter_id: str = ""
    content_id: str = ""
    alias: str = ""
    previous_adapter_id: str = ""
    refusals: list[Refusal] = []
    table: str = ""
    partition: int = -1
    offset: int = -1
    pending_adapter_id: str = ""
    trial_adapter_id: str = ""
    trial_share: float = 0.0


class AdapterRecord(msgspec.Struct, frozen=True):
    """A row of `adapters`. `weights_uri` is the canonical file the registry wrote, `checksum` its sha256.

    `content_id` is the sha256 over canonical config, tensors and base hash. (command_partition, command_offset) is the
    command that decided this row: readers ignore a row older than the one they have. `why` it is quarantined.
    """

    adapter_id: str
    customer: str
    version: int
    base_model_hash: str
    rank: int
    alpha: float
    target_modules: list[str]
    size_bytes: int
    weights_uri: str
    checksum: str
    source_uri: str
    source_checksum: str
    content_id: str
    status: AdapterStatus
    command_partition: int
    command_offset: int
    updated_unix_ms: int
    why: str = ""


class AliasRecord(msgspec.Struct, frozen=True):
    """A row of `aliases`. `previous_adapter_id` is empty for a new alias.

    `commands`: ids of the last commands that moved it, newest last: one of them sent once more moves nothing.
    """

    alias: str
    customer: str
    adapter_id: str
    previous_adapter_id: str
    command_partition: int
    command_offset: int
    updated_unix_ms: int
    commands: list[str] = []
    pending: PendingFlip | None = None
    trial: Trial | None = None

    @property
    def ends(self) -> tuple[str, ...]:
        """Where the alias points, for some conversations or for all, and where it will."""
        beside = (other.adapter_id for other in (self.pending, self.trial) if other is not None)
        return (self.adapter_id, *beside)


class AdapterEvent(msgspec.Struct, frozen=True):
    """What became of one command, in `adapter-events`: a change, or a refusal with every reason.

    (command_partition, command_offset, kind) is its identity: a crash may write it twice. `previous_adapter_id` is
    where an alias came from, or stays; `share` of its conversations go, or will go, to `adapter_id`. `why` is what a
    quarantine was given as its reason.
    """

    customer: str
    kind: EventKind
    by: str
    at_unix_ms: int
    command: str
    command_id: str
    command_partition: int
    command_offset: int
    adapter_id: str = ""
    content_id: str = ""
    alias: str = ""
    previous_adapter_id: str = ""
    status: int = 200
    reasons: list[Refusal] = []
    share: float = 1.0
    why: str = ""
