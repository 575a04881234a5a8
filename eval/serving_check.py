"""Does a real engine draft with this export what the project's own loop drafts, and is that any good?

The engine answers some prompts and every draft that it makes is kept. The same places are then drafted by the
project's own loop, token by token. Two things can be wrong, and each has its own search for the cause
(`eval.variations`): the engine drafts something else, or both draft the same and the target accepts too
little of it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from drafter.checkpoint import load_drafter
from drafter.config import SLIDING, DrafterConfig
from drafter.errors import ConfigError
from drafter.rope import normalise_rope
from eval.block_drafter import read_config
from eval.decode import Limits
from eval.errors import EvalError
from eval.known_text import KnownText, acceptance_length, agreement, own_drafts, read_text
from eval.measure import TIE_BOUNDS
from eval.prompts import load_prompts, render
from eval.sampling import Sampling
from eval.target import Target, stop_tokens
from eval.variations import Variation, taps_needed, variations
from eval.vllm_engine import Engine, EngineSettings, Generated, room_for
from pipelines.target import load_tokenizer, resolve_target, target_config

log = logging.getLogger(__name__)

_MOST_MASK_IDS = 64
_WORST_PROMPT = 0.5  # share of equal draft tokens below which one prompt is a problem by itself
_ODD_SHARE = 0.02  # share of output tokens that may differ from the target's choice, for kernels of an engine
_TEXTS_OF_SEARCH = 3
_LEAST_GAIN = 0.25  # in acceptance length, so that no search makes much of a few lucky tokens
_BEYOND_WINDOW = 64  # tokens by which the long prompt outgrows a sliding layer


class CheckOptions(BaseModel):
    """Which drafter to check, on what, and what it has to reach."""

    model_config = ConfigDict(extra="forbid")

    drafter: Path = Field(description="Exported drafter")
    target: str | None = Field(
        default=None, description="Target checkpoint or hub id; default: the one that the export names"
    )
    data: str = Field(default="builtin", description="Prompts, as for eval")
    prompts: int = Field(default=20, ge=1, description="How many; one longer than the window is added")
    max_new_tokens: int = Field(default=32, ge=2, description="Longest response, in tokens")
    min_acceptance: float = Field(
        default=1.2, ge=1.0, description="Acceptance length in the engine below which the check fails"
    )
    min_agreement: float = Field(
        default=0.9, gt=0, le=1, description="Share of draft tokens that must equal the project's own loop's"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(default="float32", description="Of all weights")
    device: str = Field(default="auto", description="Of the project's own loop: auto, cpu or cuda")
    engine_args: dict[str, Any] = Field(default={}, description="Further arguments of vllm's EngineArgs")
    log: Path = Field(default=Path("runs/check/engine.log"), description="File of what the engine prints")

    def torch_device(self) -> torch.device:
        """The device that `device` names."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)


@dataclass
class CheckResult:
    """What was found.

    Attributes:
        acceptance: in the engine, 1 + accepted tokens / drafts by vLLM's counters.
        own_acceptance: what the project's own drafts at the same places are worth.
        agreement: share of the engine's draft tokens that are the project's own, over all prompts.
        worst_agreement: the same of the prompt where it is smallest.
        prompts, drafts: how many.
        problems: why the check failed; empty when it passed.
        causes: what the searches found, most likely first.
        facts: version of vLLM, platform, device.
        counters: what vLLM's counters say.
        log: the engine's log file.
    """

    acceptance: float
    own_acceptance: float
    agreement: float
    worst_agreement: float
    prompts: int
    drafts: int
    problems: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    log: str = ""

    @property
    def passed(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, **vars(self)}


Serve = Callable[[EngineSettings, Path, Sequence[Sequence[int]], Limits], tuple[Generated, dict[str, Any]]]


def run_check(options: CheckOptions, serve: Serve | None = None) -> CheckResult:
    """Serve the drafter, compare, and search for causes where something is wrong.

    Args:
        options: what to check.
        serve: answers prompts with an engine; vLLM unless given.

    Raises:
        EvalError: the drafter names no target, prompts do not fit, or the engine could not be started.
    """
    config = read_config(options.drafter)
    checkpoint = resolve_target(options.target or _named_target(options.drafter))
    tokenizer = load_tokenizer(checkpoint)
    prompts = _prompts(options, config, tokenizer, target_config(checkpoint))
    limits = Limits(options.max_new_tokens, stop_tokens(checkpoint, tokenizer))
    settings = EngineSettings(
        target=str(checkpoint),
        method="dflash",
        drafter=str(options.drafter),
        candidates=config.version == 2,
        drafts=config.num_drafts,
        dtype=options.dtype,
        max_model_len=room_for(max(map(len, prompts)) + options.max_new_tokens, config.block_size),
        max_concurrent=1,
        stop_token_ids=sorted(limits.stop_ids),
        seed=0,
        engine_arguments=options.engine_args,
    )
    log.info("serving %s with vLLM (log: %s)", options.drafter, options.log)
    found, facts = (serve or _serve)(settings, options.log, prompts, limits)
    if not found.counters["drafts"]:
        raise EvalError(f"vLLM answered {len(prompts)} prompts without one draft; see {options.log}")
    judge = _Judge(options, checkpoint, tokenizer)
    result = judge.compare(judge.read(prompts, found))
    counters = found.counters
    result.acceptance = 1 + counters["accepted_tokens"] / counters["drafts"]
    result.facts, result.counters, result.log = facts, counters, str(options.log)
    judge.find_problems(result)
    return result


def _serve(
    settings: EngineSettings, log_file: Path, prompts: Sequence[Sequence[int]], limits: Limits
) -> tuple[Generated, dict[str, Any]]:
    with Engine(settings, log_file) as engine:
        found = engine.generate(prompts, limits=limits, sampling=Sampling(), concurrency=1, keep_drafts=True)
        return found, engine.facts


class _Judge:
    """The project's own loop beside what an engine did."""

    def __init__(self, options: CheckOptions, checkpoint: Path, tokenizer: Any) -> None:
        dtype, device = getattr(torch, options.dtype), options.torch_device()
        self._options = options
        self._target = Target.load(checkpoint, dtype=dtype, device=device, attention="folded", prepack=False)
        self._head = self._target.frozen_head
        self._drafter = load_drafter(options.drafter, dtype).to(device).eval()
        self._bound = TIE_BOUNDS[dtype]
        self._rope = _rope(target_config(checkpoint))
        self._mask_ids = _mask_candidates(tokenizer, self._drafter.config.vocab_size)
        self._texts: list[KnownText] = []
        self._agreements: list[float] = []

    def read(self, prompts: Sequence[Sequence[int]], found: Generated) -> list[KnownText]:
        """Every answer that holds a draft, read by the target."""
        layers = taps_needed(self._drafter.config, len(self._target.layers))
        return [
            read_text(self._target, prompt, response.ids, drafts, layers, self._bound)
            for prompt, response, drafts in zip(prompts, found.responses, found.drafts, strict=True)
            if drafts
        ]

    def compare(self, texts: list[KnownText]) -> CheckResult:
        """The figures, without those that only the engine knows."""
        own = [self._own(text) for text in texts]
        self._texts = texts
        self._agreements = [agreement(text, drafts) for text, drafts in zip(texts, own, strict=True)]
        places = [len(text.drafts) for text in texts]
        pooled = sum(a * n for a, n in zip(self._agreements, places, strict=True)) / sum(places)
        return CheckResult(
            acceptance=float("nan"),
            own_acceptance=acceptance_length(texts, own),
            agreement=pooled,
            worst_agreement=min(self._agreements),
            prompts=len(texts),
            drafts=sum(places),
        )

    def find_problems(self, result: CheckResult) -> None:
        """Hold the figures against the floors; search for causes of what falls short."""
        options = self._options
        tokens, odd = sum(len(t.output) for t in self._texts), sum(t.odd_tokens for t in self._texts)
        if odd > _ODD_SHARE * tokens:
            result.problems.append(
                f"{odd} of {tokens} tokens are not what the target chooses in transformers ({options.dtype})"
            )
            result.causes.append(
                "the engine runs another target: other weights, a quantised copy, or another dtype"
            )
        if result.agreement < options.min_agreement or result.worst_agreement < _WORST_PROMPT:
            result.problems.append(
                f"the engine drafts {result.agreement:.0%} of the tokens that the project's own loop drafts "
                f"({result.worst_agreement:.0%} on one prompt); expected {options.min_agreement:.0%}"
            )
            result.causes += self._what_the_engine_did()
        better = self._better_variations()
        if result.acceptance < options.min_acceptance:
            result.problems.append(
                f"acceptance length {result.acceptance:.2f} over {result.prompts} prompts, {result.drafts} "
                f"drafts, is below the floor {options.min_acceptance:.2f} (--min-acceptance)"
            )
        elif better:
            result.problems.append(
                f"acceptance length {result.acceptance:.2f} is above the floor, but the same weights do at "
                "least twice as well when they are used otherwise than the export says"
            )
        if result.acceptance < options.min_acceptance and not better:
            result.causes.append(
                "no variation of layers, positions, masks, parts and mask id does better: the drafter is "
                "weak, or made for another target, chat template or thinking mode"
            )
        result.causes += better

    def _own(self, text: KnownText, variation: Variation | None = None) -> list[list[int]]:
        config = self._drafter.config
        drafter = self._drafter if variation is None else variation.drafter()
        taps = config.target_layer_ids if variation is None else variation.taps
        return own_drafts(drafter, self._head, text, taps=taps, block=config.block_size)

    def _variations(self) -> list[Variation]:
        return list(
            variations(
                self._drafter,
                target_layers=len(self._target.layers),
                target_rope=self._rope,
                mask_ids=self._mask_ids,
            )
        )

    def _what_the_engine_did(self) -> list[str]:
        """The variation of our loop that drafts as the engine did, where it differs most."""
        order = sorted(range(len(self._texts)), key=self._agreements.__getitem__)
        worst = [self._texts[i] for i in order[:_TEXTS_OF_SEARCH]]

        def share(variation: Variation | None) -> float:
            return sum(agreement(text, self._own(text, variation)) for text in worst) / len(worst)

        as_exported = share(None)
        shares = {variation: share(variation) for variation in self._variations()}
        best = max(shares, key=shares.__getitem__)
        if shares[best] < max(self._options.min_agreement, (1 + as_exported) / 2):
            return [
                f"none of {len(shares)} variations of the own loop drafts as the engine does; look for a "
                "quantised drafter, or an engine release with another implementation"
            ]
        return [
            f"the engine drafts like the same weights with {best.what}: {shares[best]:.0%} of its tokens, "
            f"against {as_exported:.0%} as exported. {best.advice}"
        ]

    def _better_variations(self) -> list[str]:
        """Variations with which the same weights get at least twice as many drafts accepted, best first."""
        few = self._texts[:_TEXTS_OF_SEARCH]

        def length(variation: Variation | None) -> float:
            return acceptance_length(few, [self._own(text, variation) for text in few])

        as_exported = length(None)
        lengths = {variation: length(variation) for variation in self._variations()}
        enough = max(1 + 2 * (as_exported - 1), as_exported + _LEAST_GAIN)
        ranked = sorted(lengths.items(), key=lambda item: -item[1])
        return [
            f"the same weights with {variation.what} reach {found:.2f}, against {as_exported:.2f} as "
            f"exported. {variation.advice}"
            for variation, found in ranked[:3]
            if found >= enough
        ]


def _prompts(
    options: CheckOptions, config: DrafterConfig, tokenizer: Any, target: dict[str, Any]
) -> list[list[int]]:
    """Token ids of the prompts' first turns, and of one that is longer than a sliding layer looks back."""
    loaded = load_prompts(options.data, limit=options.prompts, seed=0)
    asked = [render(tokenizer, [*p.history, {"role": "user", "content": p.turns[0]}], {}) for p in loaded]
    room = int(target["max_position_embeddings"]) - room_for(options.max_new_tokens, config.block_size)
    too_long = [len(ids) for ids in asked if len(ids) > room]
    if too_long:
        raise EvalError(
            f"{len(too_long)} prompts of {options.data} are longer than {room} tokens, which is what the "
            "target's positions leave; take shorter ones"
        )
    if SLIDING in config.layer_types and config.sliding_window is not None:
        wanted = config.sliding_window + _BEYOND_WINDOW
        text = "\n".join(p.turns[0] for p in loaded)
        content = text
        while len(ids := render(tokenizer, [{"role": "user", "content": content}], {})) < wanted:
            content = f"{content}\n{text}" if text.strip() else f"{content}\n{wanted}"
        if len(ids) <= room:
            asked.append(ids)
    return asked


def _named_target(drafter: Path) -> str:
    raw = json.loads((drafter / "config.json").read_text())
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    name = raw.get("target_name_or_path") or verifier.get("name_or_path")
    if not name:
        raise EvalError(f"{drafter}/config.json names no target; give --target")
    return str(name)


def _rope(target: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return normalise_rope(target)
    except ConfigError:
        return None


def _mask_candidates(tokenizer: Any, vocab_size: int) -> list[int]:
    """Tokens that trainers take for a mask: special ones, the first unused row, the last row."""
    ids = [*getattr(tokenizer, "all_special_ids", []), *getattr(tokenizer, "added_tokens_decoder", {})]
    ids += [len(tokenizer), vocab_size - 1]
    return sorted({int(token) for token in ids if 0 <= int(token) < vocab_size})[:_MOST_MASK_IDS]


def render_check(result: CheckResult) -> Any:
    """The verdict for a terminal."""
    from rich.console import Group
    from rich.table import Table

    table = Table(title=f"{'passed' if result.passed else 'FAILED'}: drafter in vLLM {result.facts['vllm']}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in (
        ("acceptance length in the engine", f"{result.acceptance:.2f}"),
        ("acceptance length of the own loop's drafts", f"{result.own_acceptance:.2f}"),
        ("draft tokens equal to the own loop's", f"{result.agreement:.1%}"),
        ("the same on the worst prompt", f"{result.worst_agreement:.1%}"),
        ("prompts, drafts", f"{result.prompts}, {result.drafts}"),
    ):
        table.add_row(name, value)
    lines = [f"problem: {text}" for text in result.problems]
    lines += [f"likely cause: {text}" for text in result.causes]
    return Group(table, *lines, f"engine log: {result.log}")
