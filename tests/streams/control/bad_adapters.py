"""Registrations that must be refused; `python -m tests.streams.control.bad_adapters` shows what each is answered."""

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save

from schemas.adapters import RegisterAdapter
from streams.adapters.locations import parse_location
from streams.adapters.refusals import Refusals
from streams.adapters.sources import Sources
from streams.adapters.store import S3Settings, open_store
from streams.control.compiler import Base, Compiler
from streams.control.registry import Compiled
from tests.streams.adapters.files import BASE_HASH, TINY, config, header, tensors, with_header, write
from tests.streams.adapters.test_manifest import BAD_FIELDS

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Place:
    """A compiler whose sources are the folder `in`, and an honest adapter of acme in it."""

    def __init__(self, folder: Path) -> None:
        self.inbox, self.store, self.scratch = folder / "in", folder / "store", folder / "scratch"
        for one in (self.inbox, self.store, self.scratch):
            one.mkdir()
        settings = S3Settings()
        self.compiler = Compiler(
            Base(BASE_HASH, TINY),
            8,
            Sources(f"file://{self.inbox}", settings),
            open_store(parse_location(f"file://{self.store}"), settings),
        )
        self.path, self.checksum = write(self.inbox / "acme", tensors(), config())

    def command(self, **changes: Any) -> RegisterAdapter:
        honest = RegisterAdapter(
            "c", "acme/support@7", 7, BASE_HASH, 4, 8.0, MODULES, f"file://{self.path}", self.checksum
        )
        return msgspec.structs.replace(honest, **changes)

    def compile(self, command: RegisterAdapter) -> Compiled:
        found = self.compiler.compile(command, self.scratch)
        assert isinstance(found, Compiled), found.found
        return found

    def refused(self, command: RegisterAdapter) -> dict[str, str]:
        found = self.compiler.compile(command, self.scratch)
        assert isinstance(found, Refusals)
        assert not list(self.store.iterdir())
        told: dict[str, str] = {}
        for reason in found.found:
            told[reason.field] = f"{told.get(reason.field, '')} {reason.message}"
        return told


COMMANDS: list[tuple[str, dict[str, Any], str]] = [
    ("adapter_id", {"adapter_id": "acme/support"}, "customer/name@version"),
    ("adapter_id", {"adapter_id": "../support@7"}, "customer/name@version"),
    ("version", {"version": 6}, "says 7"),
    ("base_model_hash", {"base_model_hash": "c" * 64}, BASE_HASH),
    ("base_model_hash", {"base_model_hash": ""}, BASE_HASH),
    ("rank", {"rank": 8}, "r = 4"),
    ("rank", {"rank": 0}, "1 to 8"),
    ("rank", {"rank": 16}, "1 to 8"),
    ("alpha", {"alpha": 16.0}, "lora_alpha = 8"),
    ("target_modules", {"target_modules": ["q_proj"]}, "k_proj"),
    ("target_modules", {"target_modules": []}, "empty"),
    ("target_modules", {"target_modules": [*MODULES, "lm_head"]}, "lm_head"),
    ("checksum", {"checksum": "0" * 64}, "sha256 is"),
    ("checksum", {"checksum": "abc"}, "64 lower-case hex"),
    ("checksum", {"checksum": "A" * 64}, "64 lower-case hex"),
    ("weights_uri", {"weights_uri": "file:///etc/passwd"}, ".safetensors"),
    ("weights_uri", {"weights_uri": "file:///etc/x.safetensors"}, "not below"),
    ("weights_uri", {"weights_uri": "s3://another-bucket/x.safetensors"}, "not below"),
    ("weights_uri", {"weights_uri": "https://example.org/x.safetensors"}, "s3://bucket/key"),
    ("weights_uri", {"weights_uri": "http://169.254.169.254/latest/meta-data"}, "s3://bucket/key"),
    ("weights_uri", {"weights_uri": ""}, "s3://bucket/key"),
]


def _with_header_of(data: bytes, name: str, **fields: Any) -> bytes:
    told = header(data)
    told[name] = {**told[name], **fields}
    return with_header(data, told)


HONEST = save(tensors())
Q0A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q0B = Q0A.replace("lora_A", "lora_B")
FILES: dict[str, tuple[bytes, dict[str, Any] | bytes, str, str]] = {
    "truncated": (HONEST[:-100], config(), "weights_uri", "truncated"),
    "empty": (b"", config(), "weights_uri", "truncated"),
    "pickle": (b"\x80\x04cposix\nsystem\n", config(), "weights_uri", "no safetensors"),
    "zip": (b"PK\x03\x04" + b"\0" * 100, config(), "weights_uri", "no safetensors"),
    "huge header": ((1 << 40).to_bytes(8, "little") + b"{}", config(), "weights_uri", "header"),
    "overlap": (_with_header_of(HONEST, Q0B, data_offsets=[0, 512]), config(), "weights_uri", "tensor"),
    "too large": (b"\0" * (9 << 20), config(), "weights_uri", "at most"),
    "nan": (save({**tensors(), Q0A: np.full((4, 32), np.nan, np.float32)}), config(), f"tensors.{Q0A}", "finite"),
    "untrained": (save({n: v * ("lora_A" in n) for n, v in tensors().items()}), config(), "tensors", "zero"),
    "wrong shape": (save({**tensors(), Q0A: np.ones((4, 33), np.float32)}), config(), f"tensors.{Q0A}", "[4, 32]"),
    "other rank in the file": (save(tensors(rank=2)), config(), f"tensors.{Q0A}", "[4, 32]"),
    "float64": (save({**tensors(), Q0A: np.ones((4, 32))}), config(), "weights_uri", "F64"),
    "missing layer": (save(tensors(layers=(0, 1))), config(), "tensors.layers.2.q_proj.lora_A", "missing"),
    "extra tensor": (save({**tensors(), "lm_head": np.ones(3, np.float32)}), config(), "tensors.lm_head", "no LoRA"),
    "dora": (HONEST, config(use_dora=True), "adapter_config.use_dora", "DoRA"),
    "bias": (HONEST, config(bias="lora_only"), "adapter_config.bias", "none"),
    "saved modules": (HONEST, config(modules_to_save=["lm_head"]), "adapter_config.modules_to_save", "not served"),
    "unknown field": (HONEST, config(new_trick=7), "adapter_config.new_trick", "unknown"),
    "rank pattern above the limit": (HONEST, config(rank_pattern={"q_proj": 64}), "rank", "64"),
    "config no json": (HONEST, b"{", "adapter_config", "JSON"),
    "config too large": (HONEST, b" " * 300_000, "adapter_config", "at most"),
}  # fmt: skip


def answers(folder: Path) -> list[tuple[str, str]]:
    """What is wrong, and why it is refused."""
    told: list[tuple[str, str]] = []

    def tried(wrong: str, command: RegisterAdapter) -> None:
        reasons = place.refused(command)
        told.append((wrong, "; ".join(f"{field}: {message.strip()}" for field, message in reasons.items())))

    place = Place(folder)
    for field, changes, _ in COMMANDS:
        tried(f"{field} = {changes[field]!r}", place.command(**changes))
    files = {name: (weights, about) for name, (weights, about, *_) in FILES.items()}
    files |= {f"adapter_config.{field} = {value!r}": (HONEST, config(**{field: value})) for field, value in BAD_FIELDS}
    for number, (wrong, (weights, about)) in enumerate(files.items()):
        path, checksum = write(place.inbox / f"bad-{number}", weights, about)
        tried(wrong, place.command(weights_uri=f"file://{path}", checksum=checksum))
    return told


def main() -> None:
    table = Table("", "what is wrong", "the answer: 422")
    with tempfile.TemporaryDirectory() as folder:
        for number, (wrong, answer) in enumerate(answers(Path(folder)), 1):
            table.add_row(str(number), wrong[:60], answer.replace(folder, "")[:150])
    Console(width=230).print(table)


if __name__ == "__main__":
    main()
