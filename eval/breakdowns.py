"""The figures of one method: of all prompts and by data set, category, context bucket and draft position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from eval.decode import Decoded, Step
from eval.metrics import (
    Ratio,
    acceptance_at,
    acceptance_length,
    accepted_share,
    break_even,
    buckets_present,
    conditional_at,
    deepest_draft,
    in_bucket,
    mean_of_prompt_means,
    ratio,
    seconds_per_token,
    speed_up_of_steps,
)
from eval.responses import PLAIN, Response, steps_of
from eval.statistics import (
    Estimate,
    claim,
    estimate,
    estimate_quotient,
    finite,
    median_and_quartiles,
    predicted_speed_up,
)

Figures = dict[str, Any]
Seconds = Callable[[Decoded], float]

SPEED_WORDS = ("slower", "faster")


def method_figures(
    responses: Sequence[Response],
    name: str,
    *,
    seed: int,
    greedy: bool,
    tie_bound: float,
    edges: Sequence[int],
) -> Figures:
    """Everything about one method, JSON-ready."""
    first_runs = [steps_of(r, name, 0) for r in responses]
    groups: dict[str, dict[str, list[Response]]] = {"data_sets": {}, "categories": {}}
    for response in responses:
        groups["data_sets"].setdefault(response.dataset, []).append(response)
        groups["categories"].setdefault(f"{response.dataset}/{response.category}", []).append(response)
    return {
        "overall": _group(responses, name, seed=seed, greedy=greedy),
        **{
            level: {label: _group(some, name, seed=seed, greedy=greedy) for label, some in members.items()}
            for level, members in groups.items()
        },
        "contexts": {
            bucket: _context(responses, name, bucket, seed=seed, edges=edges)
            for bucket in buckets_present(first_runs, edges)
        },
        "positions": [
            {
                "position": position,
                "acceptance": estimate(acceptance_at(first_runs, position), seed=seed).to_dict(),
                "conditional": estimate(conditional_at(first_runs, position), seed=seed).to_dict(),
            }
            for position in range(1, deepest_draft(first_runs) + 1)
        ],
        "time": _time(responses, name, seed=seed, greedy=greedy),
        "lossless": _lossless(responses, name, greedy=greedy, tie_bound=tie_bound),
    }


def _group(responses: Sequence[Response], name: str, *, seed: int, greedy: bool) -> Figures:
    steps = [steps_of(r, name, 0) for r in responses]
    faster = estimate(speed_up(responses, name, greedy=greedy), seed=seed)
    end_to_end = speed_up(responses, name, greedy=greedy, with_prefill=True)
    return {
        "acceptance_length": estimate(acceptance_length(steps), seed=seed).to_dict(),
        "mean_of_prompt_means": estimate(mean_of_prompt_means(steps), seed=seed).to_dict(),
        "accepted_share": estimate(accepted_share(steps), seed=seed).to_dict(),
        "speed_up": faster.to_dict(),
        "speed_up_end_to_end": estimate(end_to_end, seed=seed).to_dict(),
        "claim": speed_claim(faster),
    }


def speed_claim(faster: Estimate) -> Figures:
    """Whether a speed-up is shown."""
    return claim(faster.value, faster.low, faster.high, faster.n, no_effect=1.0, words=SPEED_WORDS).to_dict()


def speed_up(responses: Sequence[Response], name: str, *, greedy: bool, with_prefill: bool = False) -> Ratio:
    """Plain seconds / speculative seconds of the same prompts, the median over repeats of each prompt.

    Sampled responses differ in length, so plain decoding's time is scaled to the tokens of the other
    response.
    """

    def seconds(decoded: Decoded) -> float:
        return decoded.decode_seconds + (decoded.prefill_seconds if with_prefill else 0.0)

    plain, other = per_prompt(responses, PLAIN, seconds), per_prompt(responses, name, seconds)
    what = "seconds with prefill" if with_prefill else "decode seconds"
    formula = f"plain {what} / speculative {what}"
    if not greedy:
        scale = [
            sum(s.emitted for s in steps_of(r, name, 0)) / max(1, len(steps_of(r, PLAIN, 0)))
            for r in responses
        ]
        plain = plain * np.array(scale)
        formula = f"plain {what}, scaled to the same number of tokens / speculative {what}"
    return Ratio(plain, other, formula)


def per_prompt(responses: Sequence[Response], name: str, seconds: Seconds) -> Any:
    """Float64 [n]: a prompt's seconds over all turns, the median over repeats."""
    totals = []
    for response in responses:
        repeats = len(response.turns[0].runs[name])
        totals.append(
            np.median(
                [sum(seconds(t.runs[name][repeat]) for t in response.turns) for repeat in range(repeats)]
            )
        )
    return np.array(totals, dtype=np.float64)


def prefill_seconds(responses: Sequence[Response], name: str) -> Ratio:
    """Seconds that reading a prompt takes (all its turns)."""
    seconds = per_prompt(responses, name, lambda d: d.prefill_seconds)
    return Ratio(seconds, np.ones_like(seconds), "prefill seconds / prompts")


def _context(
    responses: Sequence[Response], name: str, bucket: str, *, seed: int, edges: Sequence[int]
) -> Figures:
    first_runs = in_bucket([steps_of(r, name, 0) for r in responses], bucket, edges)
    speculative = in_bucket([steps_of(r, name) for r in responses], bucket, edges)
    plain = in_bucket([steps_of(r, PLAIN) for r in responses], bucket, edges)
    lengths = [s.context for steps in first_runs for s in steps]
    even = estimate_quotient(break_even(speculative, plain), seed=seed)
    return {
        "acceptance_length": estimate(acceptance_length(first_runs), seed=seed).to_dict(),
        "break_even": even.to_dict(),
        "speed_up": estimate_quotient(speed_up_of_steps(speculative, plain), seed=seed).to_dict(),
        "time": {
            **_parts(speculative, seed),
            "plain": estimate(seconds_per_token(plain, "plain"), seed=seed).to_dict(),
        },
        "predicted_speed_up": [
            {"acceptance_length": tau, **predicted_speed_up(tau, even).to_dict()}
            for tau in range(1, deepest_draft(first_runs) + 2)
        ],
        "mean_context": float(np.mean(lengths)),
    }


def _parts(steps: Sequence[Sequence[Step]], seed: int) -> Figures:
    def per_step(part: Callable[[Step], float], what: str) -> Figures:
        pairs = ((sum(map(part, prompt)), len(prompt)) for prompt in steps)
        return estimate(ratio(pairs, f"{what} seconds / verify steps"), seed=seed).to_dict()

    return {
        "draft": per_step(lambda s: s.draft_seconds, "draft"),
        "verify": per_step(lambda s: s.verify_seconds, "verify"),
        "other": per_step(lambda s: s.other_seconds, "other"),
    }


def _time(responses: Sequence[Response], name: str, *, seed: int, greedy: bool) -> Figures:
    by_repeat = []
    for repeat in range(len(responses[0].turns[0].runs[name])):
        chosen = [_only(r, repeat) for r in responses]
        by_repeat.append(speed_up(chosen, name, greedy=greedy).value)
    return {
        **_parts([steps_of(r, name) for r in responses], seed),
        "prefill": estimate(prefill_seconds(responses, name), seed=seed).to_dict(),
        "speed_up_by_repeat": median_and_quartiles(by_repeat),
    }


def _only(response: Response, repeat: int) -> Response:
    turns = [
        type(turn)(
            turn.prompt_tokens,
            turn.prompt_hash,
            turn.text,
            {method: runs[repeat : repeat + 1] for method, runs in turn.runs.items()},
        )
        for turn in response.turns
    ]
    return Response(response.prompt, response.key, response.dataset, response.category, turns)


def _lossless(responses: Sequence[Response], name: str, *, greedy: bool, tie_bound: float) -> Figures:
    turns = [(r.prompt, number, turn) for r in responses for number, turn in enumerate(r.turns)]
    if not greedy:
        return {
            "checked": 0,
            "note": "sampled responses are compared as distributions, by the tests of the project",
        }
    found = [
        {"prompt": prompt, "turn": number, **finite(vars(turn.differences[name]))}
        for prompt, number, turn in turns
        if name in turn.differences
    ]
    return {
        "checked": len(turns),
        "equal": len(turns) - len(found),
        "near_ties": sum(d["near_tie"] for d in found),
        "failures": sum(not d["near_tie"] for d in found),
        "tie_bound": tie_bound,
        "differences": found,
    }
