"""A PEFT folder on this machine to where the registry may read it, and to the body that registers it."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streams.adapters.base_model import BadModel, base_hash
from streams.adapters.locations import InvalidLocation, parse_location
from streams.adapters.names import InvalidName, parse_adapter
from streams.adapters.store import S3Settings, StoreError, open_store

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class BadFolder(Exception):
    """It is no PEFT folder, or cannot be put where the registry reads."""


def upload(environment: Mapping[str, str], folder: Path, adapter_id: str) -> str:
    """Copies both files to the fleet's first allowed source; the weights' URI. Raises BadFolder."""
    try:
        name = parse_adapter(adapter_id)
        source = environment["LORAFLEET_SOURCES"].split(",")[0].replace("{customer}", name.customer)
        root = parse_location(source)
        store = open_store(root, S3Settings.from_env(environment))
        for file in (CONFIG, WEIGHTS):
            store.put(
                folder / file, root.under(name.customer, f"{name.name}-{name.version}", file), _sha256(folder / file)
            )
    except (InvalidName, InvalidLocation, StoreError, OSError, ValueError) as error:
        raise BadFolder(f"{folder} was not uploaded: {error}") from None
    return str(root.under(name.customer, f"{name.name}-{name.version}", WEIGHTS))


def registration(
    environment: Mapping[str, str], folder: Path, adapter_id: str, weights_uri: str, base: str | None
) -> dict[str, Any]:
    """The body of POST /internal/adapters. `base`: the hash of the base it was trained on. Raises BadFolder."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        told = config["target_modules"]
        return {
            "adapter_id": adapter_id,
            "version": parse_adapter(adapter_id).version,
            "base_model_hash": base or base_hash(Path(environment["LORAFLEET_MODEL"])),
            "rank": config["r"],
            "alpha": config["lora_alpha"],
            "target_modules": [told] if isinstance(told, str) else told,
            "weights_uri": weights_uri,
            "checksum": _sha256(folder / WEIGHTS),
        }
    except KeyError as error:
        raise BadFolder(f"{folder}: {error.args[0]} is missing") from None
    except (InvalidName, BadModel, OSError, ValueError, TypeError) as error:
        raise BadFolder(f"{folder}: {error}") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
