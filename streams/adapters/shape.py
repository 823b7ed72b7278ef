"""The sizes of a Llama-family base model that decide an adapter's shapes. Pure: config.json in, numbers out."""

import json
from pathlib import Path

import msgspec

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


class ModelShape(msgspec.Struct, frozen=True):
    """Counts and widths as config.json names them."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int

    @classmethod
    def of(cls, folder: Path) -> "ModelShape":
        """Reads `folder`/config.json. Raises KeyError naming a field that is missing."""
        config = json.loads((folder / "config.json").read_text())
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            context=config["max_position_embeddings"],
        )

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Each adapted matrix's (k, d): A is [r, k], B is [d, r], W is [d, k]. In the fixed order of MATRICES."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q": (self.hidden, query),
            "k": (self.hidden, kv),
            "v": (self.hidden, kv),
            "o": (query, self.hidden),
            "gate": (self.hidden, self.intermediate),
            "up": (self.hidden, self.intermediate),
            "down": (self.intermediate, self.hidden),
        }
