"""What makes an export load in an engine and then serve wrongly, refused before it is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from drafter.config import DrafterConfig
from drafter.errors import ConfigError, ExportError
from drafter.model import Drafter
from drafter.rope import inverse_frequencies, normalise_rope, position_limit
from drafter.taps import tap_problem


def check_export(
    drafter: Drafter,
    target_config: Mapping[str, Any],
    *,
    special_tokens: Mapping[int, str] | None = None,
    allow_live_mask: bool = False,
    allow_rope_difference: bool = False,
) -> None:
    """Refuse a drafter that this target's engines would serve wrongly.

    Args:
        drafter: what would be exported.
        target_config: the target's config.json.
        special_tokens: ids that the tokenizer puts into text, with a word on each (`used_special_tokens`).
        allow_live_mask: accept a mask id that also occurs in text.
        allow_rope_difference: accept a rope other than the target's, when it was chosen on purpose.

    Raises:
        ExportError: every problem found, in one message.
    """
    config = drafter.config
    target = dict(target_config.get("text_config") or target_config)
    problems = [
        *_size_problems(config, target),
        *_position_problems(config, target, allow_rope_difference),
        *([] if allow_live_mask else _mask_problems(config, target_config, target, special_tokens or {})),
        *_weight_problems(drafter),
    ]
    taps = tap_problem(config.target_layer_ids, config.num_target_layers)
    if taps:
        problems.append(taps)
    if config.version == 1 and config.input_embedding_scale != 1.0:
        problems.append(
            f"input_embedding_scale {config.input_embedding_scale}: vLLM ignores it in DFlash (version 1)"
        )
    if problems:
        raise ExportError("this drafter would be served wrongly: " + "; ".join(problems))


def used_special_tokens(target_dir: str | Path) -> dict[int, str]:
    """Return the special tokens that a target's tokenizer and generation put into text, by id.

    A special token counts as used when it has a role (bos, eos, pad, ...), or when the chat template spells
    it. Reserved tokens that nothing refers to are free to be a mask, and so is the tokenizer's own mask token
    where it has no second role.
    """
    directory = Path(target_dir)
    tokenizer = _read_json(directory / "tokenizer_config.json")
    template_file = directory / "chat_template.jinja"
    template = template_file.read_text() if template_file.exists() else str(tokenizer.get("chat_template"))
    ids = {
        entry["content"]: entry["id"]
        for entry in _read_json(directory / "tokenizer.json").get("added_tokens", [])
    }
    ids |= {entry["content"]: int(key) for key, entry in tokenizer.get("added_tokens_decoder", {}).items()}
    used: dict[int, str] = {}
    for role, value in {**_read_json(directory / "special_tokens_map.json"), **tokenizer}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if role.endswith("_token") and role != "mask_token" and isinstance(text, str) and text in ids:
            used[ids[text]] = f"the tokenizer's {role} {text!r}"
    for text, token in ids.items():
        if text in template:
            used.setdefault(token, f"{text!r} of the chat template")
    generation = _read_json(directory / "generation_config.json")
    for role in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for token in _as_list(generation.get(role)):
            used.setdefault(token, f"generation_config's {role}")
    return used


def _size_problems(config: DrafterConfig, target: Mapping[str, Any]) -> list[str]:
    wanted = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.target_hidden_size,
        "num_hidden_layers": config.num_target_layers,
    }
    return [
        f"the drafter was made for a target with {key} {mine}, this one has {target.get(key)}"
        for key, mine in wanted.items()
        if target.get(key) != mine
    ]


def _position_problems(config: DrafterConfig, target: Mapping[str, Any], allow_difference: bool) -> list[str]:
    problems = []
    mine = position_limit(config.rope, config.max_position_embeddings)
    served = target.get("max_position_embeddings") or 0
    try:
        rope = normalise_rope(target)
    except ConfigError as error:
        same, reason = False, str(error)
    else:
        served = position_limit(rope, served)
        ours = inverse_frequencies(config.rope, config.head_dim, config.max_position_embeddings)
        theirs = inverse_frequencies(rope, config.head_dim, served)
        same = torch.allclose(ours[0], theirs[0], rtol=1e-6, atol=0.0) and ours[1] == theirs[1]
        reason = f"{rope}"
    if mine < served:
        problems.append(
            f"its position limit {mine} is below the target's {served}: engines size the rotary cache by it "
            "and read past its end; raise max_position_embeddings"
        )
    if not same and not allow_difference:
        problems.append(
            f"its rope {config.rope} differs from the target's ({reason}); allow this if it is meant"
        )
    return problems


def _mask_problems(
    config: DrafterConfig,
    outer: Mapping[str, Any],
    target: Mapping[str, Any],
    special_tokens: Mapping[int, str],
) -> list[str]:
    mask = config.mask_token_id
    if not 0 <= mask < config.vocab_size:
        return [f"mask_token_id {mask} is outside the target's table of {config.vocab_size} rows"]
    live = {
        token: f"the target's {role}"
        for role in ("bos_token_id", "eos_token_id", "pad_token_id")
        for source in (target, outer)
        for token in _as_list(source.get(role))
    }
    live = {**special_tokens, **live}
    if mask in live:
        return [f"mask_token_id {mask} is {live[mask]}: choose an id that never occurs in text"]
    return []


def _weight_problems(drafter: Drafter) -> list[str]:
    broken = [name for name, tensor in drafter.state_dict().items() if not tensor.isfinite().all()]
    return [f"weights are not finite: {', '.join(broken)}"] if broken else []


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}
