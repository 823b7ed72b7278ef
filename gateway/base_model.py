"""The base model as the gateway knows it: a Hugging Face folder's tokenizer, template and sizes. No weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.template import ChatTemplate, token_text
from gateway.vocabulary import Vocabulary
from streams.adapters.base_model import base_hash
from streams.bus.writer import MAX_RECORD_BYTES
from streams.formats.grammars import Grammars
from streams.formats.schema import MAX_SCHEMA_BYTES

# Prompt and output stand in one Submit when an attempt is begun anew at its end. So many ids fit into a record, at five
# bytes each at most, beside a format's schema and 20 kB for the rest; a chat beyond it is refused as one beyond the
# model's context is.
MOST_IDS = (MAX_RECORD_BYTES - MAX_SCHEMA_BYTES - 20_000) // 5


@dataclass(frozen=True)
class BaseModel:
    """`context`: the most tokens of prompt and output. `stop_ids` end an output. `created`: the folder's time, unix."""

    name: str
    base_hash: str
    context: int
    stop_ids: list[int]
    vocabulary: Vocabulary
    template: ChatTemplate
    created: int
    grammars: Grammars

    @classmethod
    def load(cls, folder: Path, name: str = "") -> "BaseModel":
        """Reads `folder`; its own name is the model's unless one is given. Raises ValueError naming what is missing."""
        config = _json(folder / "config.json")
        vocabulary = Vocabulary(folder)
        return cls(
            name=name or folder.resolve().name,
            base_hash=base_hash(folder),
            context=min(int(config["max_position_embeddings"]), MOST_IDS),
            stop_ids=_stop_ids(folder, config, vocabulary),
            vocabulary=vocabulary,
            template=ChatTemplate.of(folder),
            created=int((folder / "config.json").stat().st_mtime),
            grammars=Grammars(folder),
        )


def _stop_ids(folder: Path, config: dict[str, Any], vocabulary: Vocabulary) -> list[int]:
    """Every end of sequence that generation_config.json, config.json or the tokenizer knows."""
    generation = _json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    found: set[int] = set()
    for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
        found.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    text = token_text(_json(folder / "tokenizer_config.json").get("eos_token"))
    if text is not None and (token := vocabulary.id(text)) is not None:
        found.add(token)
    return sorted(found)


def _json(file: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}: a Hugging Face model folder has it") from error
    return value
