"""From what a pipeline uploaded to the canonical file: fetch, check everything, write. Synchronous, for a thread.

Reads only what the allow-list of sources permits and writes only below the fleet's store. Everything that speaks
against a registration is collected, not just the first. A crash leaves files in the scratch folder, nothing elsewhere;
an upload without a record behind it is replaced by the same bytes when the command comes again.
"""

import hashlib
import re
from pathlib import Path

import msgspec

from schemas.adapters import RegisterAdapter
from streams.adapters.canonical import write_canonical
from streams.adapters.locations import InvalidLocation, Location, parse_location
from streams.adapters.manifest import CONFIG_BYTES_LIMIT, Manifest, compile_manifest
from streams.adapters.names import InvalidName, parse_adapter
from streams.adapters.refusals import Refusals
from streams.adapters.shape import ModelShape
from streams.adapters.sources import Sources
from streams.adapters.store import Denied, NoFolder, NotFound, Store, TooLarge
from streams.adapters.tensors import HEADER_BYTES_LIMIT, load_delta
from streams.control.registry import Compiled

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CONFIG_NAME = "adapter_config.json"


class Base(msgspec.Struct, frozen=True):
    """The base model that this fleet serves."""

    hash: str
    shape: ModelShape


class Compiler:
    """Holds no state between calls. Its methods raise store.Unavailable, and OSError when this machine's disk fails."""

    def __init__(self, base: Base, max_rank: int, sources: Sources, store: Store) -> None:
        self._base = base
        self._max_rank = max_rank
        self._sources = sources
        self._store = store
        values = sum(max_rank * (k + d) for k, d in base.shape.matrices().values()) * base.shape.layers
        self._limit_bytes = 8 + HEADER_BYTES_LIMIT + 4 * values

    def compile(self, command: RegisterAdapter, folder: Path) -> Compiled | Refusals:
        """The canonical file, at `canonical(folder)`, or every reason against it. `folder` is an empty one."""
        refusals = Refusals()
        self._check_command(command, refusals)
        weights = self._fetch(command, folder, refusals)
        config = folder / _CONFIG_NAME
        manifest = None
        if config.exists():
            manifest = compile_manifest(config.read_bytes(), self._base.shape, refusals)
        if manifest is not None:
            self._check_declared(command, manifest, refusals)
        if weights is None:
            return refusals
        delta = load_delta(weights, manifest, self._base.shape, refusals)
        weights.unlink()
        if manifest is None or delta is None or refusals:
            return refusals
        identity = write_canonical(canonical(folder), delta, self._base.hash)
        name = parse_adapter(command.adapter_id)
        target = self._store.root.under(name.customer, name.name, str(name.version), f"{identity}.safetensors")
        with canonical(folder).open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        return Compiled(
            content_id=identity,
            rank=max(manifest.ranks.values()),
            alpha=manifest.alpha,
            target_modules=manifest.modules,
            size_bytes=canonical(folder).stat().st_size,
            weights_uri=str(target),
            checksum=checksum,
        )

    def upload(self, compiled: Compiled, folder: Path) -> None:
        """Puts the canonical file where the record will say it is."""
        self._store.put(canonical(folder), parse_location(compiled.weights_uri), compiled.checksum)

    def _check_command(self, command: RegisterAdapter, refusals: Refusals) -> None:
        """What the command says of itself."""
        try:
            version = parse_adapter(command.adapter_id).version
        except InvalidName as error:
            refusals.add("adapter_id", str(error))
        else:
            if command.version != version:
                refusals.add("version", f"{command.version}: adapter_id {command.adapter_id} says {version}")
        if command.base_model_hash != self._base.hash:
            refusals.add(
                "base_model_hash",
                f"{command.base_model_hash!r}: {self._base.hash!r} is served; an adapter fits its own base alone",
            )
        if not 1 <= command.rank <= self._max_rank:
            refusals.add("rank", f"{command.rank}: ranks from 1 to {self._max_rank} are served")
        if not command.target_modules:
            refusals.add("target_modules", "empty: the modules of adapter_config.json are needed")
        if not _SHA256.fullmatch(command.checksum):
            refusals.add("checksum", f"{command.checksum!r}: the file's sha256 in 64 lower-case hex digits is needed")

    def _fetch(self, command: RegisterAdapter, folder: Path, refusals: Refusals) -> Path | None:
        """Copies both files into `folder`. None when the weights could not be had."""
        try:
            weights = parse_location(command.weights_uri)
        except InvalidLocation as error:
            refusals.add("weights_uri", str(error))
            return None
        try:
            customer = parse_adapter(command.adapter_id).customer
        except InvalidName:
            return None  # whose folders may be read is unknown
        if not weights.segments or not weights.segments[-1].endswith(".safetensors"):
            refusals.add(
                "weights_uri", f"{weights}: a .safetensors file is needed; pickles and archives are never read"
            )
            return None
        source = self._sources.find(weights, customer)
        if source is None:
            refusals.add("weights_uri", f"{weights}: not below any place that registrations of {customer} may name")
            return None
        _get(
            source, weights.beside(_CONFIG_NAME), folder / _CONFIG_NAME, CONFIG_BYTES_LIMIT, "adapter_config", refusals
        )
        path = folder / "weights"
        found = _get(source, weights, path, self._limit_bytes, "weights_uri", refusals)
        if found is None:
            return None
        if _SHA256.fullmatch(command.checksum) and found != command.checksum:
            refusals.add("checksum", f"{command.checksum}: the file's sha256 is {found}")
        return path

    def _check_declared(self, command: RegisterAdapter, manifest: Manifest, refusals: Refusals) -> None:
        """The command against adapter_config.json, and that against the fleet's limit."""
        if command.rank != manifest.rank:
            refusals.add("rank", f"{command.rank}: adapter_config.json has r = {manifest.rank}")
        largest = max(manifest.ranks.values())
        if largest > self._max_rank:
            refusals.add(
                "rank", f"adapter_config.json asks for rank {largest}: ranks up to {self._max_rank} are served"
            )
        if command.alpha != manifest.alpha:
            refusals.add("alpha", f"{command.alpha:g}: adapter_config.json has lora_alpha = {manifest.alpha:g}")
        told, declared = manifest.target_modules, set(command.target_modules)
        same = declared == ({told} if isinstance(told, str) else set(told)) or declared == set(manifest.modules)
        if declared and not same:
            refusals.add(
                "target_modules", f"{sorted(declared)}: adapter_config.json has {told}, which adapts {manifest.modules}"
            )


def canonical(folder: Path) -> Path:
    """Where compile leaves its result."""
    return folder / "canonical"


def _get(source: Store, location: Location, path: Path, limit_bytes: int, field: str, refusals: Refusals) -> str | None:
    """The copy's sha256; None when the file cannot be had, for a reason that trying again does not help.

    A source's folder that is not there is such a reason, too: it is rather misspelt, or not made yet, than unmounted,
    and whoever named it should not wait for that word.
    """
    try:
        return source.get(location, path, limit_bytes).sha256
    except (NotFound, NoFolder, Denied, TooLarge) as error:
        refusals.add(field, str(error))
        return None
