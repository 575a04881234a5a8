"""`prompts long`: prompts of a given length in tokens, from real text."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Group
from rich.table import Table
from rich.text import Text

from eval.contexts import length_name, parse_contexts
from eval.errors import EvalError
from eval.long_kinds import Kind, Maker
from eval.long_sources import read_sources
from pipelines.target import load_tokenizer, resolve_target, target_config, tokenizer_fingerprint

log = logging.getLogger(__name__)


class LongPromptOptions(BaseModel):
    """Which long prompts to make, from what."""

    model_config = ConfigDict(extra="forbid")

    target: str = Field(description="Target checkpoint whose tokenizer and chat template count the tokens")
    data: list[str] = Field(
        description="stdlib (of the running Python), text files, folders of them, or files of records"
    )
    out: Path = Field(description="JSONL file to write")
    kind: list[Kind] = Field(
        default=["continue", "edit", "needle", "copy"],
        description="continue a text; edit a function of it; needle: find one sentence; copy a passage; "
        "session: answer a conversation of the data's records",
    )
    contexts: str = Field(default="2k,8k,32k", description="Lengths in tokens, template included; k is 1,024")
    per_context: int = Field(default=5, ge=1, description="Prompts of each kind and length")
    seed: int = Field(default=0, description="Of the choice of texts, places and numbers")
    template_args: dict[str, Any] = Field(default={}, description="Arguments of the chat template")


def write_long_prompts(options: LongPromptOptions) -> dict[str, Any]:
    """Write the file, unless it holds the same prompts already; returns counts by kind and length.

    Raises:
        EvalError: lengths that the target has no room for, or data that give too little text.
    """
    checkpoint = resolve_target(options.target)
    lengths = parse_contexts(options.contexts)
    room = int(target_config(checkpoint)["max_position_embeddings"])
    if lengths[-1] >= room:
        raise EvalError(
            f"--contexts {options.contexts}: the target has {room} positions and the response needs some, "
            f"so ask for less than {length_name(room)}"
        )
    documents, sessions = read_sources(options.data, options.seed)
    if "session" in options.kind and not sessions:
        raise EvalError(
            f"--kind session needs records with messages, found none in {', '.join(options.data)}"
        )
    maker = Maker(load_tokenizer(checkpoint), documents, sessions, options.seed, options.template_args)
    common = {
        "seed": options.seed,
        "tokenizer": tokenizer_fingerprint(checkpoint),
        "template_args": options.template_args,
    }
    records = [record | common for record in maker.records(options.kind, lengths, options.per_context)]
    text = "".join(json.dumps(record) + "\n" for record in records)
    if not options.out.is_file() or options.out.read_text(encoding="utf-8") != text:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        partial = options.out.with_name(options.out.name + ".partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, options.out)  # noqa: PTH105 atomic on one file system
    reused = sum(record["reused"] for record in records)
    if reused:
        log.warning("%d of %d prompts share text with an earlier one; add --data", reused, len(records))
    return {
        "out": str(options.out),
        "prompts": len(records),
        "reused": reused,
        "furthest_from_length": max(abs(record["tokens"] - record["context"]) for record in records),
        "made": {
            kind: {
                length_name(length): sum(r["category"] == kind and r["context"] == length for r in records)
                for length in lengths
            }
            for kind in options.kind
        },
    }


def render_long_prompts(result: Mapping[str, Any]) -> Group:
    """Prompts by kind and length."""
    table = Table()
    table.add_column("kind")
    for name in next(iter(result["made"].values())):
        table.add_column(name, justify="right")
    for kind, counts in result["made"].items():
        table.add_row(kind, *map(str, counts.values()))
    text = (
        f"{result['prompts']} prompts in {result['out']}, at most {result['furthest_from_length']} tokens "
        f"from their length; {result['reused']} of them share text with an earlier one."
    )
    return Group(table, Text(text))
