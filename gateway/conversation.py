"""Which conversation a request belongs to, and whether a version on trial serves it. Pure.

A chat is stateless: its conversation is known by how it begins, which all later requests of it repeat, and by whom it
is with. So a conversation stays with one version, through any gateway, for as long as the trial lasts; and a larger
share takes in further conversations, and moves none back. Texts that begin alike are one conversation.
"""

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from schemas.adapters import Trial

_DRAWS = 1 << 64


def conversation_id(user: str | None, beginning: Sequence[object]) -> int:
    """64 bits of who asks and how it begins: JSON values."""
    return _hash(msgspec.json.encode([user, beginning]))


def takes(trial: Trial, alias: str, conversation: int) -> bool:
    """Whether the trial of `alias` has this conversation: of many, `share` of them."""
    return _hash(msgspec.json.encode([alias, trial.adapter_id, conversation])) < trial.share * _DRAWS


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
