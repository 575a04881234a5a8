"""Some prompts, every method: interleaved, in rotating order, on the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eval.batch import NoDrafter, decode_batch
from eval.decode import Decoded, Drafter, Limits, decode_plain, decode_speculative
from eval.errors import EvalError
from eval.prompts import Message, Prompt, ids_hash, render
from eval.responses import PLAIN, Difference, Response, Turn, failed
from eval.sampling import Sampling
from eval.target import Target

#: Two logits closer than this may change order when the same sum is taken in another order. Between one-row
#: and eight-row forwards of SmolLM2-135M the distance of the top two moved by up to 3e-5 in float32 and 0.25
#: in bfloat16 (48 rows).
TIE_BOUNDS = {torch.float32: 1e-3, torch.float16: 0.125, torch.bfloat16: 0.5}


@dataclass(frozen=True)
class Bench:
    """What measuring prompts needs; everything but the prompts."""

    target: Target
    tokenizer: Any
    drafters: Sequence[Drafter]
    limits: Limits
    sampling: Sampling
    template_args: Mapping[str, Any]
    seed: int
    repeats: int
    tie_bound: float
    batch_size: int = 1

    @property
    def methods(self) -> list[str]:
        return [PLAIN, *(drafter.name for drafter in self.drafters)]


def measure(bench: Bench, prompts: Sequence[Prompt], place: int) -> list[Response]:
    """Decode all turns of some prompts with every method, the prompts of a turn together.

    Within a turn all methods see the same tokens; plain decoding's response is the history of the next turn.
    The order of methods rotates with `place` and the repeat, so that none always runs on a warm machine. A
    prompt that does not fit into the target's positions gives a failed response and leaves the others alone.
    """
    conversations = [_Conversation(prompt) for prompt in prompts]
    for number in range(max(len(prompt.turns) for prompt in prompts)):
        asked = [conversation for conversation in conversations if conversation.ask(bench, number)]
        if not asked:
            continue
        ids = [conversation.ids for conversation in asked]
        runs: dict[str, list[list[Decoded]]] = {name: [] for name in bench.methods}
        for repeat in range(bench.repeats):
            first = (place + repeat) % len(runs)
            for name in [*bench.methods[first:], *bench.methods[:first]]:
                salts = [f"{conversation.prompt.key} {number} {name}" for conversation in asked]
                runs[name].append(_decode(bench, name, ids, salts))
        for index, conversation in enumerate(asked):
            conversation.answer(bench, {name: [run[index] for run in found] for name, found in runs.items()})
    return [conversation.response() for conversation in conversations]


class _Conversation:
    """One prompt while its turns are decoded."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.ids: list[int] = []
        self._history: list[Message] = list(prompt.history)
        self._turns: list[Turn] = []
        self._error: EvalError | None = None

    def ask(self, bench: Bench, number: int) -> bool:
        """Render a turn into `ids`; False where there is none, or where it does not fit."""
        if self._error is not None or number >= len(self.prompt.turns):
            return False
        self._history.append({"role": "user", "content": self.prompt.turns[number]})
        self.ids = render(bench.tokenizer, self._history, bench.template_args)
        try:
            check_length(
                bench.target.max_positions, bench.limits, self.ids, f"{self.prompt.id}, turn {number + 1}"
            )
        except EvalError as error:
            self._error = error
        return self._error is None

    def answer(self, bench: Bench, runs: dict[str, list[Decoded]]) -> None:
        """Keep what every method gave, and let plain decoding's response be the history."""
        plain = runs[PLAIN][0].ids
        differences = {}
        if bench.sampling.greedy:
            for drafter in bench.drafters:
                found = first_difference(
                    bench.target, self.ids, plain, runs[drafter.name][0].ids, bench.tie_bound
                )
                if found is not None:
                    differences[drafter.name] = found
        text = bench.tokenizer.decode(plain, skip_special_tokens=True)
        self._turns.append(Turn(len(self.ids), ids_hash(self.ids), text, runs, differences))
        self._history.append({"role": "assistant", "content": text})

    def response(self) -> Response:
        if self._error is not None:
            return failed(self.prompt, self._error)
        prompt = self.prompt
        return Response(prompt.id, prompt.key, prompt.dataset, prompt.category, self._turns)


def check_length(positions: int, limits: Limits, ids: Sequence[int], where: str) -> None:
    """Refuse a prompt that the target has no positions for."""
    room = positions - limits.max_new_tokens
    if len(ids) > room:
        raise EvalError(
            f"{where} has {len(ids)} tokens, but of the target's {positions} positions "
            f"{limits.max_new_tokens} are for the response; lower max_new_tokens or shorten the prompt"
        )


def _decode(
    bench: Bench, method: str, prompts: Sequence[Sequence[int]], salts: Sequence[str]
) -> list[Decoded]:
    generator = None
    if not bench.sampling.greedy:
        digest = hashlib.sha256(f"{bench.seed} {' '.join(salts)}".encode()).digest()
        generator = torch.Generator(bench.target.device).manual_seed(int.from_bytes(digest[:6], "big"))
    settings: dict[str, Any] = {"limits": bench.limits, "sampling": bench.sampling, "generator": generator}
    drafter = next((d for d in bench.drafters if d.name == method), None)
    if bench.batch_size > 1:
        together = (
            NoDrafter() if drafter is None else drafter.batched(len(prompts), bench.sampling, generator)
        )
        return decode_batch(bench.target, together, prompts, **settings)
    if drafter is None:
        return [decode_plain(bench.target, ids, **settings) for ids in prompts]
    return [decode_speculative(bench.target, drafter, ids, **settings) for ids in prompts]


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
