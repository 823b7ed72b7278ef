"""What is made once per user and kept outside the checkout: the broker's jars and the converted model.

A folder appears whole or not at all: it is made under another name and renamed. A file lock makes the second of two
simultaneous makers wait for the first. A killed maker leaves only a temporary folder, which the next one removes.
"""

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path


def made_once(folder: Path, make: Callable[[Path], None], whole: Callable[[Path], bool] = Path.is_dir) -> Path:
    """`folder`, made by `make(temporary folder)` unless it is there and `whole` holds. Passes on what `make` raises."""
    if folder.exists() and whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists() and whole(folder):
            return folder
        temporary = folder.parent / f".{folder.name}.part"
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.mkdir()
        make(temporary)
        temporary.rename(folder)
    return folder
