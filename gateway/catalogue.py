"""What each customer may name as `model`, and what stands behind the name. Pure.

Owns this gateway's view of the tables `adapters` and `aliases`. Ordering relied on: records carry the place of the
command that decided them, and one customer's commands are in one partition; a record older than the one here is
ignored. An alias is resolved here and nowhere else. Whatever a customer may not use looks like what is not there.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from gateway.conversation import takes
from gateway.errors import ApiError
from schemas.adapters import AdapterRecord, AliasRecord
from schemas.reasons import AdapterStatus
from streams.adapters.names import AdapterName, InvalidName, parse_model

SHOWN = 120


@dataclass(frozen=True)
class Target:
    """What a model name stands for; both empty for the base model."""

    adapter: str
    content_id: str


BASE = Target("", "")


class Catalogue:
    """`base_name` is the base model's name, `base_hash` what adapters must have been trained on."""

    def __init__(self, base_name: str, base_hash: str) -> None:
        self.base_name = base_name
        self._base_hash = base_hash
        self._adapters: dict[str, AdapterRecord] = {}
        self._aliases: dict[str, AliasRecord] = {}

    def apply_adapter(self, adapter_id: str, record: AdapterRecord | None) -> None:
        """A record of `adapters`; None: a tombstone."""
        if record is None:
            self._adapters.pop(adapter_id, None)
        elif _newer(record, self._adapters.get(adapter_id)):
            self._adapters[adapter_id] = record

    def apply_alias(self, alias: str, record: AliasRecord | None) -> None:
        """A record of `aliases`; None: a tombstone."""
        if record is None:
            self._aliases.pop(alias, None)
        elif _newer(record, self._aliases.get(alias)):
            self._aliases[alias] = record

    def resolve(self, customer: str, model: str, conversation: int) -> Target:
        """An alias with a trial stands for one of two versions, by the conversation.

        Raises ApiError: model_not_found, the same for unknown, foreign and retired; or quarantined.
        """
        if model == self.base_name:
            return BASE
        record = self._tried(customer, model, conversation) or self._find(customer, model)
        if record is None or record.status is AdapterStatus.RETIRED:
            raise not_found(model)
        if record.status is AdapterStatus.QUARANTINED:
            raise quarantined(model, record.why)
        return Target(record.adapter_id, record.content_id)

    def adapter(self, adapter_id: str) -> AdapterRecord | None:
        return self._adapters.get(adapter_id)

    def quarantined(self) -> int:
        """How many adapters are."""
        return sum(record.status is AdapterStatus.QUARANTINED for record in self._adapters.values())

    def adapters(self, customer: str | None = None) -> list[AdapterRecord]:
        """All, or one customer's, by id."""
        return sorted(
            (r for r in self._adapters.values() if customer is None or r.customer == customer),
            key=lambda record: record.adapter_id,
        )

    def aliases(self, customer: str | None = None) -> list[AliasRecord]:
        """All, or one customer's, by name."""
        return sorted(
            (r for r in self._aliases.values() if customer is None or r.customer == customer),
            key=lambda record: record.alias,
        )

    def models(self, customer: str) -> Iterator[tuple[str, AdapterRecord]]:
        """The names that `resolve` takes for the customer, besides the base model's."""
        for alias in self.aliases(customer):
            record = self._find(customer, alias.alias)
            if record is not None and record.status is AdapterStatus.READY:
                yield alias.alias, record
        for record in self.adapters(customer):
            if record.status is AdapterStatus.READY and record.base_model_hash == self._base_hash:
                yield record.adapter_id, record

    def _tried(self, customer: str, model: str, conversation: int) -> AdapterRecord | None:
        """The version on trial, where it serves the conversation. One that is not ready serves none."""
        alias = self._aliases.get(model)
        if alias is None or alias.trial is None or not takes(alias.trial, model, conversation):
            return None
        record = self._find(customer, alias.trial.adapter_id)
        return record if record is not None and record.status is AdapterStatus.READY else None

    def _find(self, customer: str, model: str) -> AdapterRecord | None:
        try:
            name = parse_model(model)
        except InvalidName:
            return None
        if name.customer != customer:
            return None
        adapter_id = model
        if not isinstance(name, AdapterName):
            alias = self._aliases.get(model)
            if alias is None or alias.customer != customer:
                return None
            adapter_id = alias.adapter_id
        record = self._adapters.get(adapter_id)
        if record is None or record.customer != customer or record.base_model_hash != self._base_hash:
            return None
        return record


def not_found(model: str) -> ApiError:
    """The one answer to any model that is not there for this key."""
    shown = model if len(model) <= SHOWN else model[: SHOWN - 3] + "..."
    return ApiError("model_not_found", f"The model '{shown}' does not exist or you do not have access to it.", "model")


def quarantined(model: str, why: str, also: str = "") -> ApiError:
    """`why`: the row's own word, which is written for the customer. A row from before there was one has none."""
    return ApiError("quarantined", f"{model} is quarantined{f': {why}' if why else ''}{also}", "model")


def _newer(record: AdapterRecord | AliasRecord, held: AdapterRecord | AliasRecord | None) -> bool:
    return (
        held is None
        or held.command_partition != record.command_partition  # the topic was repartitioned: offsets do not compare
        or record.command_offset >= held.command_offset
    )
