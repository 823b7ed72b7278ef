"""adapter_config.json (PEFT) to a manifest: every field is applied, neutral, or refused by name. Pure but for patterns.

Refusing is the point: an engine that skips a field it does not know serves other weights than were trained. What is
neutral is listed with the values that change nothing; any other value, and any unknown field, is a refusal.
"""

import json
import math
from typing import Any

import msgspec

from streams.adapters.delta import Place
from streams.adapters.patterns import BadPattern, full_matches, suffix_matches
from streams.adapters.refusals import Refusals
from streams.adapters.shape import MATRICES, ModelShape

CONFIG_BYTES_LIMIT = 256 * 1024

_MODULE = {
    **{matrix: f"self_attn.{matrix}_proj" for matrix in ("q", "k", "v", "o")},
    **{matrix: f"mlp.{matrix}_proj" for matrix in ("gate", "up", "down")},
}

_APPLIED = {
    "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "rank_pattern", "alpha_pattern",
}  # fmt: skip

# They describe where an adapter comes from or how it was trained, or belong to a feature that its own field turns off.
_WITHOUT_EFFECT = {
    "peft_version", "base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "lora_dropout",
    "megatron_core", "qalora_group_size",
}  # fmt: skip

_OFF: list[Any] = [None, False, [], {}]
_NEUTRAL: dict[str, tuple[list[Any], str]] = {
    "peft_type": (["LORA"], "only LoRA adapters are served"),
    "task_type": ([None, "CAUSAL_LM"], "only causal language models are served"),
    "bias": (["none"], "trained biases are not served"),
    "fan_in_fan_out": ([False], "the base's weights are not transposed"),
    "init_lora_weights": (
        [True, False, "gaussian", "orthogonal"],
        "other initial weights change the base model itself; convert the adapter to plain LoRA first",
    ),
    "modules_to_save": (_OFF, "whole modules beside the base are not served"),
    "trainable_token_indices": (_OFF, "trained token embeddings are not served"),
    "target_parameters": (_OFF, "only linear layers are adapted"),
    "layer_replication": (_OFF, "the base's layers are not repeated"),
    "use_dora": (_OFF, "DoRA is not served"),
    "use_qalora": (_OFF, "QA-LoRA is not served"),
    "use_bdlora": (_OFF, "block-diagonal LoRA is not served"),
    "lora_bias": (_OFF, "a bias on B is not served"),
    "alora_invocation_tokens": (_OFF, "activated LoRA is not served"),
    "arrow_config": (_OFF, "arrow routing is not served"),
    "kasa_config": (_OFF, "KaSA is not served"),
    "velora_config": (_OFF, "VeLoRA is not served"),
    "monteclora_config": (_OFF, "Monte Carlo LoRA is not served"),
    "megatron_config": (_OFF, "Megatron layers are not served"),
    "loftq_config": (_OFF, "LoftQ changes the base's weights"),
    "eva_config": (_OFF, "EVA initialisation is not supported"),
    "corda_config": (_OFF, "CorDA changes the base's weights"),
    "lora_ga_config": (_OFF, "LoRA-GA changes the base's weights"),
    "ensure_weight_tying": (_OFF, "tied embeddings are not adapted"),
}


class Manifest(msgspec.Struct, frozen=True):
    """What the config says of each adapted matrix. `modules`: the adapted ones' names, q_proj ..., in fixed order."""

    rank: int
    alpha: float
    target_modules: list[str] | str
    modules: list[str]
    ranks: dict[Place, int]
    scales: dict[Place, float]


def module_name(place: Place) -> str:
    """As PEFT names it: model.layers.3.self_attn.q_proj."""
    layer, matrix = place
    return f"model.layers.{layer}.{_MODULE[matrix]}"


def compile_manifest(raw: bytes, shape: ModelShape, refusals: Refusals) -> Manifest | None:
    """Adds every reason against the config to `refusals`; None if it does not say which matrices are adapted, and how.

    A manifest beside a reason (DoRA, say) serves to find what else is wrong with the adapter, and nothing more.
    """
    config = _parse(raw, refusals)
    if config is None:
        return None
    for field, value in config.items():
        if field in _NEUTRAL:
            neutral, reason = _NEUTRAL[field]
            if not any(type(value) is type(one) and value == one for one in neutral):
                accepted = ", ".join(json.dumps(one) for one in neutral)
                refusals.add(_field(field), f"{_shown(value)}: {reason}; accepted: {accepted}")
        elif field not in _APPLIED and field not in _WITHOUT_EFFECT:
            refusals.add(_field(field), f"{_shown(value)}: unknown field; it may change the result, so it is refused")
    if "peft_type" not in config:
        refusals.add(_field("peft_type"), 'missing; accepted: "LORA"')
    own = Refusals()
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not _is_rank(rank):
        own.add(_field("r"), f"{_shown(rank)}: a whole number from 1 on is needed")
    if not _is_alpha(alpha):
        own.add(_field("lora_alpha"), f"{_shown(alpha)}: a finite number other than 0 is needed")
    rslora = config.get("use_rslora", False)
    if not isinstance(rslora, bool):
        own.add(_field("use_rslora"), f"{_shown(rslora)}: true or false is needed")
    names = {module_name((layer, matrix)): (layer, matrix) for layer in range(shape.layers) for matrix in MATRICES}
    targets = _targets(config, list(names), shape, own)
    adapted = [place for name, place in names.items() if name in targets]
    ranks = _per_module(config, "rank_pattern", list(names), _is_rank, own)
    alphas = _per_module(config, "alpha_pattern", list(names), _is_alpha, own)
    if not own and not adapted:
        own.add(_field("target_modules"), f"{_shown(config.get('target_modules'))}: adapts no matrix of the base")
    refusals.take(own)
    if own or rank is None or alpha is None:
        return None
    rank_of = {place: int(ranks.get(module_name(place), rank)) for place in adapted}
    scale_of = {
        place: float(alphas.get(module_name(place), alpha)) / (math.sqrt(r) if rslora else r)
        for place, r in rank_of.items()
    }
    present = {matrix for _, matrix in adapted}
    return Manifest(
        rank=rank,
        alpha=float(alpha),
        target_modules=config["target_modules"],
        modules=[f"{matrix}_proj" for matrix in MATRICES if matrix in present],
        ranks=rank_of,
        scales=scale_of,
    )


def _parse(raw: bytes, refusals: Refusals) -> dict[str, Any] | None:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a field stands twice")
        return dict(pairs)

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is no JSON number")

    try:
        config = json.loads(raw, object_pairs_hook=once, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        refusals.add("adapter_config", f"no JSON: {error}")
        return None
    if not isinstance(config, dict):
        refusals.add("adapter_config", f"a JSON object is needed, found {type(config).__name__}")
        return None
    return config


def _targets(config: dict[str, Any], names: list[str], shape: ModelShape, refusals: Refusals) -> set[str]:
    """The modules that PEFT adapts under this config."""
    excluded = _selected("exclude_modules", config.get("exclude_modules") or [], names, refusals)
    target = config.get("target_modules")
    if target == "all-linear":
        found = set(names)
    elif isinstance(target, str) or (isinstance(target, list) and target):
        found = _selected("target_modules", target, names, refusals)
        if isinstance(target, list):
            for entry in target:
                if isinstance(entry, str) and not _ending_with(entry, names):
                    refusals.add(
                        _field("target_modules"), f"{_shown(entry)}: no matrix that can be adapted has this name"
                    )
    else:
        refusals.add(
            _field("target_modules"), f"{_shown(target)}: a list of modules, an expression or all-linear is needed"
        )
        return set()
    return (found & _in_layers(config, names, shape, refusals)) - excluded


def _selected(field: str, value: Any, names: list[str], refusals: Refusals) -> set[str]:
    if isinstance(value, str):
        try:
            return full_matches(value, names)
        except BadPattern as error:
            refusals.add(_field(field), f"{_shown(value)}: {error}")
            return set()
    if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
        refusals.add(_field(field), f"{_shown(value)}: a list of module names or an expression is needed")
        return set()
    return {name for entry in value for name in _ending_with(entry, names)}


def _ending_with(entry: str, names: list[str]) -> list[str]:
    return [name for name in names if name == entry or name.endswith(f".{entry}")]


def _in_layers(config: dict[str, Any], names: list[str], shape: ModelShape, refusals: Refusals) -> set[str]:
    layers, pattern = config.get("layers_to_transform"), config.get("layers_pattern")
    if pattern not in (None, "", [], "layers", ["layers"]):
        refusals.add(_field("layers_pattern"), f'{_shown(pattern)}: the base has its layers under "layers" alone')
    if layers is None or layers == []:
        return set(names)
    if isinstance(config.get("target_modules"), str):
        refusals.add(_field("layers_to_transform"), f"{_shown(layers)}: has no meaning when target_modules is no list")
    wanted = layers if isinstance(layers, list) else [layers]
    if not all(type(layer) is int and 0 <= layer < shape.layers for layer in wanted):
        refusals.add(
            _field("layers_to_transform"), f"{_shown(layers)}: layers from 0 to {shape.layers - 1} are accepted"
        )
        return set()
    return {module_name((layer, matrix)) for layer in wanted for matrix in MATRICES}


def _per_module(
    config: dict[str, Any], field: str, names: list[str], accepted: Any, refusals: Refusals
) -> dict[str, Any]:
    """Module -> the value of the first key that matches it, as PEFT reads rank_pattern and alpha_pattern."""
    pattern = config.get(field) or {}
    if not isinstance(pattern, dict) or len(pattern) > 1_000:
        refusals.add(_field(field), f"{_shown(pattern)}: an object of at most 1,000 modules is needed")
        return {}
    found: dict[str, Any] = {}
    for key, value in pattern.items():
        if not accepted(value):
            refusals.add(_field(field), f"{_shown(key)}: {_shown(value)} is no value for it")
            continue
        try:
            matching = suffix_matches(key, names)
        except BadPattern as error:
            refusals.add(_field(field), f"{_shown(key)}: {error}")
            return {}
        for name in matching:
            found.setdefault(name, value)
    return found


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 65_536


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and value != 0 and abs(value) <= 1e6


def _field(name: str) -> str:
    return f"adapter_config.{name}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
