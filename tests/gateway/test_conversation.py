"""Which version a conversation meets while one is on trial: the same one each time, and of many the share."""

import msgspec
import pytest

from gateway.catalogue import Catalogue
from gateway.conversation import takes
from gateway.openai_api import parse_chat, parse_completion
from schemas.adapters import Trial
from schemas.reasons import AdapterStatus
from tests.gateway.test_catalogue import adapter, alias

PROD = "acme/support:prod"
MANY = 20_000


def trial(share: float, version: int = 2) -> Trial:
    return Trial(f"acme/support@{version}", share, "c", "topic", 0)


def chat(*messages: tuple[str, str], user: str | None = None) -> int:
    said = [{"role": role, "content": content} for role, content in messages]
    return parse_chat(msgspec.json.encode({"model": PROD, "messages": said, "user": user})).conversation


def completion(prompt: object, user: str | None = None) -> int:
    return parse_completion(msgspec.json.encode({"model": PROD, "prompt": prompt, "user": user})).conversation


def test_a_chat_is_known_by_its_beginning_and_its_user() -> None:
    first = (("system", "Be kind."), ("user", "Hello"))
    longer = (*first, ("assistant", "Hello!"), ("user", "Why?"))
    assert chat(*first) == chat(*longer)
    assert len({chat(*first), chat(*first, user="ann"), chat(*first, user="ben"), chat(("user", "Hello"))}) == 4
    assert chat(("user", "ab"), ("user", "c")) == chat(("user", "ab"))
    assert chat(("system", "a"), ("user", "b")) != chat(("system", "ab"))


def test_a_completion_is_known_by_its_user_or_by_all_of_it() -> None:
    assert completion("a", user="ann") == completion("b", user="ann")
    assert len({completion("a"), completion("b"), completion([1, 2]), completion(["1", "2"])}) == 4


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_of_many_conversations_it_has_the_share(share: float) -> None:
    taken = sum(takes(trial(share), PROD, conversation) for conversation in range(MANY))
    spread = (share * (1 - share) / MANY) ** 0.5
    assert abs(taken / MANY - share) < 5 * spread


def test_a_larger_share_takes_in_and_moves_none_back() -> None:
    small, large = ({n for n in range(MANY) if takes(trial(share), PROD, n)} for share in (0.1, 0.4))
    assert small < large
    again = {n for n in range(MANY) if takes(trial(0.1, version=3), PROD, n)}
    assert len(small & again) < len(small) / 2  # the next version is not tried on the same people


def test_an_alias_stands_for_either_by_conversation_and_for_one_if_the_other_is_not_ready() -> None:
    catalogue = Catalogue("base", "b")
    for version in (1, 2):
        catalogue.apply_adapter(f"acme/support@{version}", adapter(f"acme/support@{version}"))
    tried = msgspec.structs.replace(alias(PROD, "acme/support@1"), trial=trial(0.5))
    catalogue.apply_alias(PROD, tried)
    seen = {n: catalogue.resolve("acme", PROD, n).adapter for n in range(100)}
    assert set(seen.values()) == {"acme/support@1", "acme/support@2"}
    assert seen == {n: catalogue.resolve("acme", PROD, n).adapter for n in range(100)}
    assert catalogue.resolve("acme", "acme/support@1", 0).adapter == "acme/support@1"
    for status in (AdapterStatus.QUARANTINED, AdapterStatus.RETIRED):
        catalogue.apply_adapter("acme/support@2", adapter("acme/support@2", status, offset=1))
        assert {catalogue.resolve("acme", PROD, n).adapter for n in range(100)} == {"acme/support@1"}
