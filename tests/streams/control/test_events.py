"""Which event each decided command is, and that a second delivery makes the same one."""

from schemas.adapters import AdapterCommand, AdapterEvent, RetireAdapter, RollbackAlias, SetAlias
from streams.control.events import event_of
from streams.control.registry import Origin
from tests.streams.control.test_registry import ONE, PROD, TWO, Log, register


class Story(Log):
    """A log whose decisions are told as events."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = -1

    def tell(self, command: AdapterCommand, offset: int | None = None) -> AdapterEvent | None:
        """`offset`: of a command that is delivered again."""
        self.offset += offset is None
        at = self.offset if offset is None else offset
        decision = self._decide(command, Origin(3, at, 1_000 + at))
        event = event_of(self.state, "acme", command, decision, Origin(3, at, 1_000 + at))
        self.apply(decision)
        return event


def kinds(story: Story, *commands: AdapterCommand) -> list[str | None]:
    return [event.kind if event is not None else None for event in map(story.tell, commands)]


def test_changes_and_refusals_are_told_and_nothing_else() -> None:
    assert kinds(
        Story(),
        register(ONE),
        register(ONE),
        register(ONE, "d" * 64),
        register(TWO, "c" * 64),
        SetAlias("c1", PROD, ONE),
        SetAlias("c2", PROD, ONE),
        RetireAdapter("c3", ONE),
        SetAlias("c4", PROD, TWO),
        RollbackAlias("c5", PROD),
        RetireAdapter("c6", TWO),
        RetireAdapter("c7", TWO),
        SetAlias("c8", PROD, TWO),
    ) == [
        "registered", None, "refused", "registered", "moved", None, "refused", "moved", "moved", "retired", None,
        "refused",
    ]  # fmt: skip


def test_who_when_and_where_from() -> None:
    story = Story()
    story.tell(register(ONE))
    story.tell(register(TWO, "c" * 64))
    story.tell(SetAlias("c1", PROD, ONE))
    event = story.tell(SetAlias("c2", PROD, TWO, "acme pipeline lf-3b1"))
    assert event is not None
    assert (event.by, event.command, event.command_id, event.at_unix_ms) == (
        "acme pipeline lf-3b1",
        "alias",
        "c2",
        1_003,
    )
    assert (event.alias, event.previous_adapter_id, event.adapter_id) == (PROD, ONE, TWO)
    back = story.tell(RollbackAlias("c3", PROD))
    assert back is not None
    assert (back.by, back.command, back.adapter_id, back.previous_adapter_id) == ("topic", "rollback", ONE, TWO)
    refused = story.tell(RetireAdapter("c4", ONE))
    assert refused is not None
    assert PROD in refused.reasons[0].message


def test_delivered_again_it_is_the_same_event() -> None:
    """A crash may have come between the row and the event."""
    story = Story()
    for command in (register(ONE), SetAlias("c1", PROD, ONE), register(TWO, "c" * 64), RetireAdapter("c2", TWO)):
        first = story.tell(command)
        assert first is not None
        assert story.tell(command, story.offset) == first


def test_what_was_overtaken_is_not_told_as_a_refusal() -> None:
    story = Story()
    for command in (register(ONE), register(TWO, "c" * 64), SetAlias("c1", PROD, ONE), SetAlias("c2", PROD, TWO)):
        story.tell(command)
    assert story.tell(SetAlias("c1", PROD, ONE), 2) is None
