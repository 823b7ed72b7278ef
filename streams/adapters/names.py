"""The grammar of customer ids, adapter ids and aliases. Pure.

customer `acme`; adapter `acme/support@7`, one immutable version; alias `acme/support:prod`, which points at one. Lower
case only, one slash in every adapter id and alias and none in a base model's name, so that nothing here can stand for
the base model, nor one customer's name for another's. All parts are safe as path and object-key segments.
"""

import re

import msgspec

_WORD = r"[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?"
_CUSTOMER = re.compile(_WORD)
_ADAPTER = re.compile(rf"(?P<customer>{_WORD})/(?P<name>{_WORD})@(?P<version>[1-9][0-9]{{0,8}})")
_ALIAS = re.compile(rf"(?P<customer>{_WORD})/(?P<name>{_WORD}):(?P<label>{_WORD})")

_WORDS = "1 to 64 of a-z 0-9 _ - that begin and end with a letter or digit"


class InvalidName(ValueError):
    """The text is no such name; the message shows the text (shortened) and the form it should have."""


class AdapterName(msgspec.Struct, frozen=True):
    customer: str
    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.customer}/{self.name}@{self.version}"


class AliasName(msgspec.Struct, frozen=True):
    customer: str
    name: str
    label: str

    def __str__(self) -> str:
        return f"{self.customer}/{self.name}:{self.label}"


def parse_customer(text: str) -> str:
    """The customer id itself. Raises InvalidName."""
    if not _CUSTOMER.fullmatch(text):
        raise InvalidName(f"{_shown(text)} is no customer id: {_WORDS}")
    return text


def parse_adapter(text: str) -> AdapterName:
    """`customer/name@version`. Raises InvalidName."""
    found = _ADAPTER.fullmatch(text)
    if not found:
        raise InvalidName(f"{_shown(text)} is no adapter id: customer/name@version, each word {_WORDS}, version from 1")
    return AdapterName(found["customer"], found["name"], int(found["version"]))


def parse_alias(text: str) -> AliasName:
    """`customer/name:label`. Raises InvalidName."""
    found = _ALIAS.fullmatch(text)
    if not found:
        raise InvalidName(f"{_shown(text)} is no alias: customer/name:label, each word {_WORDS}")
    return AliasName(found["customer"], found["name"], found["label"])


def parse_model(text: str) -> AdapterName | AliasName:
    """What a chat request may name besides the base model. Raises InvalidName."""
    found = _ADAPTER.fullmatch(text)
    if found:
        return AdapterName(found["customer"], found["name"], int(found["version"]))
    return parse_alias(text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
