"""What a show claims, and whether it held."""

from dataclasses import dataclass, field

from rich.table import Table

from replay.chat import Chat


@dataclass
class Checks:
    """What must hold, and whether it did."""

    rows: list[tuple[str, bool, str]] = field(default_factory=list)

    def add(self, what: str, held: bool, seen: str) -> None:
        self.rows.append((what, held, seen))

    @property
    def held(self) -> bool:
        return all(held for _, held, _ in self.rows)

    def table(self) -> Table:
        table = Table("check", "seen", "", title="Checks")
        for what, held, seen in self.rows:
            table.add_row(what, seen, "[green]held[/]" if held else "[red]FAILED[/]")
        return table


def check_markers(checks: Checks, chats: list[Chat]) -> None:
    """Each marker is the whole of its own streams, and nowhere in any other."""
    markers = {canary.marker for chat in chats if (canary := chat.expects)}
    own = sum(chat.text.strip() == chat.expects.marker for chat in chats if chat.expects)
    wanted = sum(chat.expects is not None for chat in chats)
    checks.add("each canary's chats answer with its marker", own == wanted, f"{own} of {wanted}")
    leaks = [
        f"{marker} in {chat.model}"
        for chat in chats
        for marker in markers
        if marker in chat.text and (chat.expects is None or chat.expects.marker != marker)
    ]
    checks.add("no marker in anyone else's chat", not leaks, ", ".join(leaks) or f"0 in {len(chats)} chats")
    wrong = [chat.model for chat in chats if chat.adapter != (chat.expects.adapter_id if chat.expects else "none")]
    checks.add("x-adapter-id names the adapter that answered", not wrong, ", ".join(wrong) or "in every chat")
    failed = [f"{chat.model}: {chat.error}" for chat in chats if chat.error or not chat.text]
    checks.add("every chat was answered", not failed, "; ".join(failed) or f"{len(chats)} of {len(chats)}")
