"""Secrets of one home folder: made once, kept in files that only their owner can read."""

import os
import secrets
from pathlib import Path


def kept_secret(file: Path, prefix: str = "") -> str:
    """The text in `file`; the first time `prefix` + 43 random characters (256 bits)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        write_private(file, prefix + secrets.token_urlsafe(32) + "\n")
    return file.read_text().strip()


def write_private(file: Path, text: str) -> None:
    """Writes `file` whole or not at all, readable by its owner alone from its first byte on."""
    temporary = file.with_name(f".{file.name}.part")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(text)
    temporary.replace(file)
