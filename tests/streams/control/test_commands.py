"""Raw records to commands: all faults of a record at once, and somebody to tell them to where there is one."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.adapters import (
    ConcludeFlip,
    PendingFlip,
    QuarantineAdapter,
    RegisterAdapter,
    ReleaseAdapter,
    RetireAdapter,
    RollbackAlias,
    SetAlias,
)
from schemas.codec import encode
from schemas.topics import ADAPTER_COMMANDS
from streams.control.commands import BadCommand, read_command

REGISTER = RegisterAdapter("c1", "acme/support@7", 7, "b" * 64, 4, 8.0, ["q_proj"], "s3://in/a.safetensors", "0" * 64)
COMMANDS = [
    REGISTER,
    RetireAdapter("c2", "acme/support@7"),
    QuarantineAdapter("c6", "acme/support@7", "it rambles"),
    ReleaseAdapter("c7", "acme/support@7"),
    SetAlias("c3", "acme/support:prod", "acme/support@7"),
    RollbackAlias("c4", "acme/support:prod"),
    ConcludeFlip(
        "c5", "acme/support:prod", PendingFlip("acme/support@7", "alias", "c3", "topic", 1, 2, 3), True, "", "registry"
    ),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_what_the_codec_writes_is_read(command: Any) -> None:
    assert read_command(encode(ADAPTER_COMMANDS, command)) == command


def changed(**fields: Any) -> bytes:
    told = {"type": "register", **msgspec.to_builtins(REGISTER), **fields}
    return msgspec.json.encode({name: value for name, value in told.items() if value is not ...})


@pytest.mark.parametrize(
    ("raw", "fields"),
    [
        (changed(rank="4"), {"rank"}),
        (changed(rank=4.5, alpha="8", target_modules="q_proj"), {"rank", "alpha", "target_modules"}),
        (changed(checksum=..., version=...), {"checksum", "version"}),
        (changed(extra=1, tenant="x"), {"extra", "tenant"}),
        (changed(rank=None, extra=1, checksum=...), {"rank", "extra", "checksum"}),
        (changed(type="delete"), {"type"}),
        (changed(type=...), {"type"}),
        (changed(type=["register"]), {"type"}),
    ],
)
def test_every_fault_is_told(raw: bytes, fields: set[str]) -> None:
    with pytest.raises(BadCommand) as refused:
        read_command(raw)
    assert refused.value.command_id == "c1"
    assert {reason.field for reason in refused.value.refusals.found} == fields


NO_ID = [changed(command_id=5), changed(command_id=...), changed(command_id="")]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, *NO_ID])
def test_nobody_to_answer(raw: bytes) -> None:
    with pytest.raises(BadCommand) as refused:
        read_command(raw)
    assert refused.value.command_id == ""


@given(st.binary(max_size=300))
def test_any_bytes_are_a_command_or_refused(raw: bytes) -> None:
    with pytest.raises(BadCommand):
        read_command(raw)
