"""Rotary position embedding: what config.json says of it, and the frequencies that follow.

Sources: RoPE (Su et al. 2021), linear scaling (Chen et al. 2023), YaRN (Peng et al. 2023), Llama 3.1's own scaling.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

# Fields of each kind beside the base's theta, all numbers above 0: name -> what stands for a missing one, None where it
# must be given.
_FIELDS: dict[str, dict[str, float | None]] = {
    "default": {},
    "linear": {"factor": None},
    "llama3": {
        "factor": None,
        "low_freq_factor": None,
        "high_freq_factor": None,
        "original_max_position_embeddings": None,
    },
    "yarn": {
        "factor": None,
        "original_max_position_embeddings": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 0.0,  # computed from the factor
    },
}
_NEUTRAL = {"partial_rotary_factor": (1.0, None), "truncate": (True,)}
_DEFAULT_THETA = 10000.0


class Rotation(msgspec.Struct, frozen=True):
    """`given` holds the numbers of the kind's fields."""

    theta: float
    kind: str
    given: dict[str, float]

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied with."""
        if self.kind != "yarn":
            return 1.0
        return self.given["attention_factor"] or 0.1 * math.log(max(1.0, self.given["factor"])) + 1.0

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians per position, float32 [head_dim / 2]."""
        plain = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        match self.kind:
            case "linear":
                return plain / self.given["factor"]
            case "llama3":
                return self._llama3(plain)
            case "yarn":
                return self._yarn(plain, head_dim)
        return plain

    def _llama3(self, plain: Tensor) -> Tensor:
        """Fast frequencies stay, slow ones are divided, those between are blended by how often they turn."""
        given = self.given
        low, high = given["low_freq_factor"], given["high_freq_factor"]
        turns = given["original_max_position_embeddings"] * plain / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * plain / given["factor"] + kept * plain

    def _yarn(self, plain: Tensor, head_dim: int) -> Tensor:
        """Dimensions that turn more than beta_fast times stay, below beta_slow they are divided, a ramp between."""
        given = self.given

        def dimension(turns: float) -> float:
            context = given["original_max_position_embeddings"]
            return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low = max(math.floor(dimension(given["beta_fast"])), 0)
        high = min(math.ceil(dimension(given["beta_slow"])), head_dim - 1)
        # Where low is above high the ramp runs down, as it does in transformers.
        ramp = ((torch.arange(head_dim // 2).float() - low) / (high - low or 0.001)).clamp(0, 1)
        return plain / given["factor"] * ramp + plain * (1 - ramp)


def read_rotation(fields: Mapping[str, Any], reasons: list[str]) -> Rotation:
    """Out of config.json, old (rope_theta, rope_scaling) or new (rope_parameters); `reasons` gets what is refused."""
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    said = fields.get(name) or {}
    if not isinstance(said, dict):
        reasons.append(f"{name}: {said!r} is not an object")
        return Rotation(_DEFAULT_THETA, "default", {})
    said = dict(said)
    if name == "rope_parameters" and fields.get("rope_scaling"):
        reasons.append("rope_scaling: given beside rope_parameters, and readers differ in which counts; leave one out")
    theta = said.pop("rope_theta", fields.get("rope_theta", _DEFAULT_THETA))
    if not _number(theta) or theta <= 1:
        reasons.append(f"rope_theta: {theta!r} is not a number above 1")
    kind = said.pop("rope_type", said.pop("type", "default"))
    said.pop("type", None)
    if kind not in _FIELDS:
        reasons.append(f"{name}.rope_type: {kind!r} is not supported, only {', '.join(_FIELDS)}")
        return Rotation(theta, "default", {})
    given: dict[str, float] = {}
    for field, missing in _FIELDS[kind].items():
        value = said.pop(field, None)
        if value is None and missing is not None:
            given[field] = missing
        elif not _number(value) or value <= 0:
            reasons.append(f"{name}.{field}: {value!r}, rope_type {kind} needs a number above 0")
        else:
            given[field] = float(value)
    for field, value in said.items():
        if value not in _NEUTRAL.get(field, ()):
            reasons.append(f"{name}.{field}: {value!r} is not supported")
    if kind == "llama3" and given.get("low_freq_factor", 0.0) >= given.get("high_freq_factor", math.inf):
        reasons.append(f"{name}.low_freq_factor: {given['low_freq_factor']} is not below high_freq_factor")
    return Rotation(theta, kind, given)


def _number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
