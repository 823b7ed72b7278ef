"""What commands do to the tables: case by case, and then in any order, with any of them delivered again."""

from collections.abc import Iterable

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.adapters import (
    AdapterCommand,
    AdapterRecord,
    AliasCommand,
    AliasRecord,
    ConcludeFlip,
    QuarantineAdapter,
    RegisterAdapter,
    ReleaseAdapter,
    RetireAdapter,
    RollbackAlias,
    SetAlias,
)
from schemas.reasons import AdapterStatus
from streams.control import moves, registry
from streams.control.registry import Compiled, Decision, Origin, State


class Log:
    """Applies decisions as the registrar does: the record, then the state that a reader builds of all records."""

    def __init__(self) -> None:
        self.adapters: dict[str, AdapterRecord] = {}
        self.aliases: dict[str, AliasRecord] = {}
        self.decided: dict[int, int] = {}
        self.state = State(self.adapters, self.aliases, self.decided, 30.0)
        self.records = 0

    def decide(self, command: AdapterCommand, offset: int) -> Decision:
        """A command without an id of its own, "c", gets that of its offset. A flip is concluded right behind it."""
        if command.command_id == "c":
            command = msgspec.structs.replace(command, command_id=f"c{offset}")
        decision = self.deliver(command, 10 * offset)
        row = decision.record
        if isinstance(row, AliasRecord) and row.pending is not None:
            decision = self.deliver(ConcludeFlip(f"f{offset}", row.alias, row.pending, True, ""), 10 * offset + 1)
        return decision

    def deliver(self, command: AdapterCommand, offset: int) -> Decision:
        """As it stands in the log."""
        decision = self._decide(command, Origin(3, offset, 1_000 + offset))
        self.apply(decision)
        return decision

    def apply(self, decision: Decision) -> None:
        if isinstance(decision.record, AdapterRecord):
            self.adapters[decision.record.adapter_id] = decision.record
        elif isinstance(decision.record, AliasRecord):
            self.aliases[decision.record.alias] = decision.record
        if decision.record is not None:
            self.records += 1
            self.decided[3] = max(self.decided.get(3, -1), decision.record.command_offset)

    def _decide(self, command: AdapterCommand, origin: Origin) -> Decision:
        if isinstance(command, AliasCommand):
            return moves.decide(self.state, command, origin)
        again = registry.delivered_again(self.state, command, origin)
        if again is not None:
            return again
        if isinstance(command, RetireAdapter):
            return registry.retire(self.state, command, origin)
        if isinstance(command, QuarantineAdapter):
            return registry.quarantine(self.state, command, origin)
        if isinstance(command, ReleaseAdapter):
            return registry.release(self.state, command, origin)
        retired = registry.register_retired(self.state, command)
        return retired or registry.register(self.state, command, compiled(command.checksum), origin)

    def snapshot(self) -> tuple[dict[str, AdapterRecord], dict[str, AliasRecord]]:
        return dict(self.adapters), dict(self.aliases)


def compiled(content: str) -> Compiled:
    return Compiled(content, 4, 8.0, ["q_proj"], 100, f"s3://adapters/{content}", "1" * 64)


def register(adapter: str, content: str = "a" * 64) -> RegisterAdapter:
    version = int(adapter.rpartition("@")[2])
    return RegisterAdapter("c", adapter, version, "b" * 64, 4, 8.0, ["q_proj"], "s3://in/a.safetensors", content)


def run(commands: Iterable[AdapterCommand]) -> tuple[Log, list[int]]:
    log = Log()
    return log, [log.decide(command, offset).result.status for offset, command in enumerate(commands)]


ONE, TWO, PROD = "acme/support@1", "acme/support@2", "acme/support:prod"


def test_a_registration_writes_all_columns() -> None:
    log, statuses = run([register(ONE)])
    assert statuses == [201]
    row = log.adapters[ONE]
    assert (row.customer, row.version, row.status) == ("acme", 1, AdapterStatus.READY)
    assert (row.command_partition, row.command_offset, row.updated_unix_ms) == (3, 0, 1_000)
    assert row.source_checksum == row.content_id == "a" * 64


def test_the_same_again_and_another_content() -> None:
    log, statuses = run([register(ONE), register(ONE), register(ONE, "c" * 64), register(TWO, "c" * 64)])
    assert statuses == [201, 200, 409, 201]
    assert log.records == 2


def test_identical_bytes_of_two_customers_are_two_adapters() -> None:
    log, statuses = run([register(ONE), register("globex/support@1")])
    assert statuses == [201, 201]
    assert {row.customer for row in log.adapters.values()} == {"acme", "globex"}


def test_an_alias_needs_its_own_ready_adapter() -> None:
    log, statuses = run(
        [
            SetAlias("c", PROD, ONE),
            register("globex/support@1"),
            SetAlias("c", PROD, "globex/support@1"),
            register(ONE),
            RetireAdapter("c", ONE),
            SetAlias("c", PROD, ONE),
        ]
    )
    assert statuses == [404, 201, 422, 201, 200, 409]
    assert not log.aliases


def test_deploy_and_rollback_keep_the_previous_adapter() -> None:
    log = Log()
    for offset, command in enumerate((register(ONE), register(TWO, "c" * 64))):
        log.decide(command, offset)
    first = log.decide(SetAlias("c", PROD, ONE), 2).result
    assert (first.status, first.previous_adapter_id) == (201, "")
    deployed = log.decide(SetAlias("c", PROD, TWO), 3).result
    assert (deployed.status, deployed.adapter_id, deployed.previous_adapter_id) == (200, TWO, ONE)
    same = log.decide(SetAlias("c", PROD, TWO), 4)
    assert (same.result.status, same.record) == (200, None)
    back = log.decide(RollbackAlias("c", PROD), 5).result
    assert (back.status, back.adapter_id, back.previous_adapter_id) == (200, ONE, TWO)
    forward = log.decide(RollbackAlias("c", PROD), 6).result
    assert (forward.adapter_id, forward.previous_adapter_id) == (TWO, ONE)


def test_a_rollback_needs_somewhere_to_go() -> None:
    log, statuses = run(
        [
            register(ONE),
            register(TWO, "c" * 64),
            RollbackAlias("c", PROD),
            SetAlias("c", PROD, ONE),
            RollbackAlias("c", PROD),
            SetAlias("c", PROD, TWO),
            RetireAdapter("c", ONE),
            RollbackAlias("c", PROD),
        ]
    )
    assert statuses == [201, 201, 404, 201, 409, 200, 200, 409]
    assert log.aliases[PROD].adapter_id == TWO
    nowhere = log.decide(RollbackAlias("c", PROD), 8).result
    assert "acme/support@1, where acme/support:prod came from, is retired" in nowhere.refusals[0].message


def test_a_command_sent_twice_moves_an_alias_once() -> None:
    """The same id again, as a command of its own in the log."""
    log, _ = run([register(ONE), register(TWO, "c" * 64), SetAlias("c", PROD, ONE), SetAlias("c", PROD, TWO)])
    first = log.decide(RollbackAlias("mine", PROD), 4)
    again = log.decide(RollbackAlias("mine", PROD), 5)
    assert (again.result, again.record) == (first.result, None)
    log.decide(SetAlias("later", PROD, TWO), 6)
    overtaken = log.decide(RollbackAlias("mine", PROD), 7)
    assert (overtaken.result.status, overtaken.result.refusals[0].field) == (409, "command_id")
    assert log.aliases[PROD].adapter_id == TWO


def test_an_alias_remembers_a_bounded_number_of_commands() -> None:
    log, _ = run([register(ONE), register(TWO, "c" * 64), SetAlias("c", PROD, ONE)])
    for offset in range(3, 3 + 2 * moves.REMEMBERED):
        assert log.decide(SetAlias("c", PROD, (ONE, TWO)[offset % 2]), offset).result.status == 200
    assert len(log.aliases[PROD].commands) == moves.REMEMBERED


def test_retire_waits_for_the_aliases() -> None:
    log, statuses = run(
        [
            RetireAdapter("c", ONE),
            register(ONE),
            register(TWO, "c" * 64),
            SetAlias("c", PROD, ONE),
            RetireAdapter("c", ONE),
            SetAlias("c", PROD, TWO),
            RetireAdapter("c", ONE),
            RetireAdapter("c", ONE),
            register(ONE),
            register(ONE, "d" * 64),
        ]
    )
    assert statuses == [404, 201, 201, 201, 409, 200, 200, 200, 409, 409]
    assert log.adapters[ONE].status is AdapterStatus.RETIRED
    assert log.adapters[ONE].content_id == "a" * 64


def test_a_refused_command_delivered_again_stays_without_effect() -> None:
    """Refused while an alias pointed; the alias has moved since; the old command must not retire the adapter now."""
    log, _ = run(
        [register(ONE), register(TWO), SetAlias("c", PROD, ONE), RetireAdapter("c", ONE), SetAlias("c", PROD, TWO)]
    )
    assert log.decide(RetireAdapter("c", ONE), 3).result.status == 409
    assert log.adapters[ONE].status is AdapterStatus.READY


def test_quarantine_and_release_lead_to_each_other() -> None:
    log, statuses = run(
        [
            QuarantineAdapter("c", ONE, "it rambles"),
            ReleaseAdapter("c", ONE),
            register(ONE),
            ReleaseAdapter("c", ONE),
            QuarantineAdapter("c", ONE, " it rambles "),
            QuarantineAdapter("c", ONE, "it rambles still"),
        ]
    )
    assert statuses == [404, 404, 201, 200, 200, 200]
    row = log.adapters[ONE]
    assert (row.status, row.why, row.command_offset, log.records) == (AdapterStatus.QUARANTINED, "it rambles", 40, 2)
    assert log.decide(ReleaseAdapter("c", ONE), 6).result.status == 200
    assert (log.adapters[ONE].status, log.adapters[ONE].why) == (AdapterStatus.READY, "")
    assert log.decide(ReleaseAdapter("c", ONE), 7).record is None


def test_a_quarantined_adapter_keeps_its_aliases_and_gets_no_new_ones() -> None:
    log, statuses = run(
        [
            register(ONE),
            register(TWO, "c" * 64),
            SetAlias("c", PROD, ONE),
            QuarantineAdapter("c", ONE, "it rambles"),
            SetAlias("c", "acme/other:prod", ONE),
            register(ONE),
            RetireAdapter("c", ONE),
            SetAlias("c", PROD, TWO),
            RollbackAlias("c", PROD),
        ]
    )
    assert statuses == [201, 201, 201, 200, 409, 409, 409, 200, 409]
    assert log.aliases[PROD].adapter_id == TWO


def test_a_quarantined_adapter_may_be_retired_and_stays_so() -> None:
    log, statuses = run(
        [
            register(ONE),
            QuarantineAdapter("c", ONE, "it rambles"),
            RetireAdapter("c", ONE),
            ReleaseAdapter("c", ONE),
            QuarantineAdapter("c", ONE, "it rambles"),
        ]
    )
    assert statuses == [201, 200, 200, 409, 409]
    assert (log.adapters[ONE].status, log.adapters[ONE].why) == (AdapterStatus.RETIRED, "it rambles")


def test_a_quarantine_says_why() -> None:
    log, _ = run([register(ONE)])
    for why in ("", "  ", "two\nlines", "x" * (registry.LONGEST_WHY + 1)):
        result = log.decide(QuarantineAdapter("c", ONE, why), 1).result
        assert (result.status, [reason.field for reason in result.refusals]) == (422, ["why"]), why
    assert log.adapters[ONE].status is AdapterStatus.READY


ADAPTERS = st.sampled_from([ONE, TWO, "acme/sales@1", "globex/support@1"])
ALIASES = st.sampled_from([PROD, "acme/sales:prod", "globex/support:prod"])
COMMANDS = st.one_of(
    st.builds(register, ADAPTERS, st.sampled_from(["a" * 64, "c" * 64])),
    st.builds(RetireAdapter, st.just("c"), ADAPTERS),
    st.builds(QuarantineAdapter, st.just("c"), ADAPTERS, st.sampled_from(["it rambles", "it is wrong"])),
    st.builds(ReleaseAdapter, st.just("c"), ADAPTERS),
    st.builds(SetAlias, st.just("c"), ALIASES, ADAPTERS),
    st.builds(RollbackAlias, st.just("c"), ALIASES),
)


@given(st.lists(COMMANDS, max_size=25), st.data())
@settings(max_examples=300)
def test_any_history_however_often_it_is_delivered(commands: list[AdapterCommand], data: st.DataObject) -> None:
    once, _ = run(commands)
    log, done = Log(), 0
    while done < len(commands):
        # A crash sends the reader back to any earlier command; then it goes on in order.
        back = data.draw(st.integers(0, done)) if data.draw(st.booleans()) else done
        before = log.snapshot()
        for offset in range(back, done):
            decision = log.decide(commands[offset], offset)
            assert decision.record is None
        assert log.snapshot() == before
        log.decide(commands[done], done)
        done += 1
    assert log.snapshot() == once.snapshot()
    for alias, row in log.aliases.items():
        adapter = log.adapters[row.adapter_id]
        assert adapter.status is not AdapterStatus.RETIRED, f"{alias} points at a retired adapter"
        assert adapter.customer == row.customer
    for adapter in log.adapters.values():
        assert bool(adapter.why) is (adapter.status is AdapterStatus.QUARANTINED) or adapter.status == "retired"


@given(st.lists(COMMANDS, max_size=25))
def test_an_id_never_changes_its_content(commands: list[AdapterCommand]) -> None:
    log, contents = Log(), dict[str, str]()
    for offset, command in enumerate(commands):
        log.decide(command, offset)
        for adapter_id, row in log.adapters.items():
            assert contents.setdefault(adapter_id, row.content_id) == row.content_id


@given(st.lists(COMMANDS, min_size=1, max_size=25))
def test_a_crash_between_record_and_result_gives_the_same_answer(commands: list[AdapterCommand]) -> None:
    log = Log()
    for offset, command in enumerate(commands):
        first = log.decide(command, offset)
        again = log.decide(command, offset)
        assert again.record is None
        if first.record is not None:
            told, retold = msgspec.to_builtins(first.result), msgspec.to_builtins(again.result)
            assert told == retold
        elif first.result.status >= 400:
            assert again.result.status >= 400
