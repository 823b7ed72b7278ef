"""Which event each decided command is, and that a second delivery makes the same one."""

from schemas.adapters import (
    AdapterCommand,
    AdapterEvent,
    ConcludeFlip,
    EndTrial,
    QuarantineAdapter,
    ReleaseAdapter,
    RetireAdapter,
    RollbackAlias,
    SetAlias,
)
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

    def conclude(self, warm: bool = True, why: str = "") -> AdapterEvent | None:
        flip = self.aliases[PROD].pending
        assert flip is not None
        return self.tell(ConcludeFlip("f", PROD, flip, warm, why))


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
        RollbackAlias("c5", PROD),
        RetireAdapter("c6", TWO),
        RetireAdapter("c7", TWO),
        SetAlias("c8", PROD, TWO),
    ) == ["registered", None, "refused", "registered", "moved", None, "refused", "refused", "retired", None, "refused"]


def deployed() -> Story:
    story = Story()
    for command in (register(ONE), register(TWO, "c" * 64), SetAlias("c1", PROD, ONE)):
        story.tell(command)
    return story


def test_who_when_and_where_from() -> None:
    story = deployed()
    warming = story.tell(SetAlias("c2", PROD, TWO, "acme pipeline lf-3b1"))
    moved = story.conclude()
    for event, kind, at in ((warming, "warming", 1_003), (moved, "moved", 1_004)):
        assert event is not None
        assert (event.kind, event.by, event.command, event.command_id, event.at_unix_ms) == (
            kind, "acme pipeline lf-3b1", "alias", "c2", at,
        )  # fmt: skip
        assert (event.alias, event.previous_adapter_id, event.adapter_id) == (PROD, ONE, TWO)
    story.tell(RollbackAlias("c3", PROD))
    back = story.conclude()
    assert back is not None
    assert (back.by, back.command, back.adapter_id, back.previous_adapter_id) == ("topic", "rollback", ONE, TWO)
    refused = story.tell(RetireAdapter("c4", ONE))
    assert refused is not None
    assert PROD in refused.reasons[0].message


def test_a_quarantine_and_a_release_are_told() -> None:
    story = Story()
    story.tell(register(ONE))
    for command in (QuarantineAdapter("c1", ONE, "it rambles", "ops"), ReleaseAdapter("c2", ONE, "ops")):
        event = story.tell(command)
        assert event is not None
        assert story.tell(command, story.offset) == event
        assert (event.by, event.adapter_id, event.at_unix_ms) == ("ops", ONE, 1_000 + story.offset)
        wanted = ("quarantined", "it rambles") if command.command_id == "c1" else ("released", "")
        assert (event.kind, event.why, event.command_id) == (*wanted, command.command_id)
        assert story.tell(command) is None  # as it is already
    refused = story.tell(QuarantineAdapter("c3", TWO, "it rambles"))
    assert refused is not None
    assert (refused.kind, refused.status) == ("refused", 404)


def test_an_alias_that_stays_says_why() -> None:
    story = deployed()
    story.tell(SetAlias("c2", PROD, TWO))
    kept = story.conclude(False, "too slow")
    assert kept is not None
    assert (kept.kind, kept.adapter_id, kept.command_id) == ("kept", ONE, "c2")
    assert "too slow" in kept.reasons[0].message
    story.tell(SetAlias("c3", PROD, TWO))
    off = story.tell(RollbackAlias("c4", PROD))
    assert off is not None
    assert (off.kind, off.adapter_id, off.command) == ("kept", ONE, "rollback")


def test_a_trial_and_its_end_are_told() -> None:
    story = deployed()
    told = [story.tell(SetAlias("c2", PROD, TWO, "acme pipeline lf-3b1", 0.25)), story.conclude()]
    told.append(story.tell(SetAlias("c3", PROD, TWO, share=0.5)))
    trial = story.aliases[PROD].trial
    assert trial is not None
    ended = EndTrial("e", PROD, trial, "3 of 3 failed", "registry")
    told += [story.tell(ended), story.tell(ended, story.offset)]
    assert [(event.kind, event.share, event.adapter_id, event.previous_adapter_id) for event in told if event] == [
        ("warming", 0.25, TWO, ONE), ("tried", 0.25, TWO, ONE), ("tried", 0.5, TWO, ONE), ("kept", 1.0, ONE, TWO),
        ("kept", 1.0, ONE, TWO),
    ]  # fmt: skip
    assert told[3] is not None
    assert told[3].by == "registry"
    assert told[3].reasons[0].message == "acme/support@2 is no longer tried: 3 of 3 failed"
    assert told[3] == told[4]


def test_delivered_again_it_is_the_same_event() -> None:
    """A crash may have come between the row and the event."""
    story = Story()
    for command in (register(ONE), SetAlias("c1", PROD, ONE), register(TWO, "c" * 64), RetireAdapter("c2", TWO)):
        first = story.tell(command)
        assert first is not None
        assert story.tell(command, story.offset) == first
    story.tell(register("acme/support@3", "e" * 64))
    for warm in (False, True):
        story.tell(SetAlias(f"move-{warm}", PROD, "acme/support@3"))
        flip = story.aliases[PROD].pending
        assert flip is not None
        conclusion = ConcludeFlip("f", PROD, flip, warm, "")
        told = story.tell(conclusion)
        assert told is not None
        assert story.tell(conclusion, story.offset) == told


def test_what_was_overtaken_is_not_told_as_a_refusal() -> None:
    story = Story()
    for command in (register(ONE), register(TWO, "c" * 64), SetAlias("c1", PROD, ONE), SetAlias("c2", PROD, TWO)):
        story.tell(command)
    story.conclude()
    assert story.tell(SetAlias("c1", PROD, ONE), 2) is None
