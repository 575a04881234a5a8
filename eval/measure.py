"""One prompt, every method: interleaved, in rotating order, on the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eval.decode import Decoded, Drafter, Limits, decode_plain, decode_speculative
from eval.errors import EvalError
from eval.prompts import Message, Prompt, ids_hash, render
from eval.responses import PLAIN, Difference, Response, Turn
from eval.sampling import Sampling
from eval.target import Target

#: Two logits closer than this may change order when the same sum is taken in another order. Between one-row
#: and eight-row forwards of SmolLM2-135M the distance of the top two moved by up to 3e-5 in float32 and 0.25
#: in bfloat16 (48 rows).
TIE_BOUNDS = {torch.float32: 1e-3, torch.float16: 0.125, torch.bfloat16: 0.5}


@dataclass(frozen=True)
class Bench:
    """What measuring a prompt needs; everything but the prompt."""

    target: Target
    tokenizer: Any
    drafters: Sequence[Drafter]
    limits: Limits
    sampling: Sampling
    template_args: Mapping[str, Any]
    seed: int
    repeats: int
    tie_bound: float

    @property
    def methods(self) -> list[str]:
        return [PLAIN, *(drafter.name for drafter in self.drafters)]


def measure(bench: Bench, prompt: Prompt, place: int) -> Response:
    """Decode all turns of a prompt with every method.

    Within a turn all methods see the same tokens; plain decoding's response is the history of the next turn.
    The order of methods rotates with `place` and the repeat, so that none always runs on a warm machine.

    Raises:
        EvalError: a turn and its response do not fit into the target's positions.
    """
    history: list[Message] = list(prompt.history)
    turns = []
    for number, text in enumerate(prompt.turns):
        history.append({"role": "user", "content": text})
        ids = render(bench.tokenizer, history, bench.template_args)
        check_length(bench, len(ids), f"{prompt.id}, turn {number + 1}")
        runs: dict[str, list[Decoded]] = {name: [] for name in bench.methods}
        for repeat in range(bench.repeats):
            first = (place + repeat) % len(runs)
            for name in [*bench.methods[first:], *bench.methods[:first]]:
                runs[name].append(_decode(bench, name, ids, f"{prompt.key} {number} {name}"))
        plain = runs[PLAIN][0].ids
        differences = {}
        if bench.sampling.greedy:
            for drafter in bench.drafters:
                difference = first_difference(
                    bench.target, ids, plain, runs[drafter.name][0].ids, bench.tie_bound
                )
                if difference is not None:
                    differences[drafter.name] = difference
        response = bench.tokenizer.decode(plain, skip_special_tokens=True)
        turns.append(Turn(len(ids), ids_hash(ids), response, runs, differences))
        history.append({"role": "assistant", "content": response})
    return Response(prompt.id, prompt.key, prompt.dataset, prompt.category, turns)


def check_length(bench: Bench, prompt_tokens: int, where: str) -> None:
    """Refuse a prompt that the target has no positions for."""
    room = bench.target.max_positions - bench.limits.max_new_tokens
    if prompt_tokens > room:
        raise EvalError(
            f"{where} has {prompt_tokens} tokens, but of the target's {bench.target.max_positions} positions "
            f"{bench.limits.max_new_tokens} are for the response; lower max_new_tokens or shorten the prompt"
        )


def _decode(bench: Bench, method: str, ids: Sequence[int], salt: str) -> Decoded:
    generator = None
    if not bench.sampling.greedy:
        digest = hashlib.sha256(f"{bench.seed} {salt}".encode()).digest()
        generator = torch.Generator(bench.target.device).manual_seed(int.from_bytes(digest[:6], "big"))
    settings: dict[str, Any] = {"limits": bench.limits, "sampling": bench.sampling, "generator": generator}
    if method == PLAIN:
        return decode_plain(bench.target, ids, **settings)
    drafter = next(d for d in bench.drafters if d.name == method)
    return decode_speculative(bench.target, drafter, ids, **settings)


@torch.inference_mode()
def first_difference(
    target: Target, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], tie_bound: float
) -> Difference | None:
    """Where two greedy responses part and how close the target's choice was there; None if they do not."""
    index = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if index is None:
        if len(plain) == len(other):
            return None
        return Difference(min(len(plain), len(other)), float("inf"), float("inf"), near_tie=False)
    session = target.open()
    logits_V = session.prefill(torch.tensor([*prompt, *plain[:index]], device=target.device)).float()
    gap = float(logits_V[plain[index]] - logits_V[other[index]])
    highest = logits_V.topk(2).values
    top_two = float(highest[0] - highest[1])
    near_tie = abs(gap) <= tie_bound and float(highest[0] - logits_V[plain[index]]) <= tie_bound
    return Difference(index, gap, top_two, near_tie)
