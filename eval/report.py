"""From responses to a report: every figure with its formula, its counts, n and a 95 % interval."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.decode import Decoded, Step
from eval.metrics import (
    Ratio,
    acceptance_at,
    acceptance_length,
    break_even,
    buckets_present,
    conditional_at,
    deepest_draft,
    in_bucket,
    mean_of_prompt_means,
    ratio,
)
from eval.responses import PLAIN, Response, steps_of
from eval.statistics import (
    FEW_PROMPTS,
    compare,
    estimate,
    estimate_break_even,
    median_and_quartiles,
)

SCHEMA_VERSION = 1

Report = dict[str, Any]
Seconds = Callable[[Decoded], float]


def build_report(
    responses: Sequence[Response],
    failures: Sequence[Response],
    *,
    methods: Sequence[str],
    seed: int,
    greedy: bool,
    tie_bound: float,
) -> Report:
    """The report as JSON-ready data.

    Args:
        responses: finished prompts.
        failures: prompts that could not be decoded.
        methods: names in the order to show them; plain decoding first.
        seed: of the resampling.
        greedy: whether responses can be compared token by token.
        tie_bound: logit distance within which a greedy difference is rounding.
    """
    speculative = [name for name in methods if name != PLAIN]
    report: Report = {
        "schema_version": SCHEMA_VERSION,
        "prompts": _prompts(responses, failures),
        "plain": _plain(responses, seed),
        "methods": {
            name: _method(responses, name, seed=seed, greedy=greedy, tie_bound=tie_bound)
            for name in speculative
        },
        "comparisons": _comparisons(responses, speculative, seed=seed, greedy=greedy),
    }
    report["warnings"] = _warnings(report)
    return report


def write_report(report: Report, out: Path) -> None:
    """Write the plots, `report.md` and at last `report.json` into `out`: where that is, all of them are."""
    from eval.plots import write_plots
    from eval.report_text import markdown

    plots = write_plots(report, out)
    (out / "report.md").write_text(markdown(report, plots), encoding="utf-8")
    partial = out / "report.json.partial"
    partial.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    partial.replace(out / "report.json")


def read_report(out: Path) -> Report | None:
    """The finished report in a folder; None where there is none of this schema version."""
    path = out / "report.json"
    if not path.is_file():
        return None
    report: Report = json.loads(path.read_text(encoding="utf-8"))
    return report if report["schema_version"] == SCHEMA_VERSION else None


def _prompts(responses: Sequence[Response], failures: Sequence[Response]) -> Report:
    hashes = sorted(turn.prompt_hash for r in responses for turn in r.turns)
    lengths = [turn.prompt_tokens for r in responses for turn in r.turns]
    return {
        "n": len(responses),
        "turns": len(hashes),
        "data_sets": {
            name: sum(r.dataset == name for r in responses) for name in _ordered(responses, "dataset")
        },
        "tokens": {"shortest": min(lengths), "longest": max(lengths)},
        "rendered_hash": hashlib.sha256("".join(hashes).encode()).hexdigest()[:16],
        "failures": [{"prompt": r.prompt, "error": r.error} for r in failures],
    }


def _plain(responses: Sequence[Response], seed: int) -> Report:
    repeats = len(responses[0].turns[0].runs[PLAIN])
    rates = []
    for repeat in range(repeats):
        steps = [step for r in responses for step in steps_of(r, PLAIN, repeat)]
        rates.append(sum(s.seconds for s in steps) / max(1, len(steps)))
    seconds = _per_prompt(responses, PLAIN, lambda d: d.decode_seconds)
    tokens = np.array([len(steps_of(r, PLAIN, 0)) for r in responses], dtype=np.float64)
    per_token = Ratio(seconds, tokens, "plain decode seconds / plain tokens after the first")
    return {
        "seconds_per_token": estimate(per_token, seed=seed).to_dict(),
        "seconds_per_token_by_repeat": median_and_quartiles(rates),
        "prefill_seconds": float(_per_prompt(responses, PLAIN, lambda d: d.prefill_seconds).sum()),
    }


def _method(responses: Sequence[Response], name: str, *, seed: int, greedy: bool, tie_bound: float) -> Report:
    first_runs = [steps_of(r, name, 0) for r in responses]
    return {
        "overall": _group(responses, name, seed=seed, greedy=greedy),
        "data_sets": {
            value: _group([r for r in responses if r.dataset == value], name, seed=seed, greedy=greedy)
            for value in _ordered(responses, "dataset")
        },
        "categories": {
            f"{dataset}/{value}": _group(
                [r for r in responses if (r.dataset, r.category) == (dataset, value)],
                name,
                seed=seed,
                greedy=greedy,
            )
            for dataset, value in dict.fromkeys((r.dataset, r.category) for r in responses)
        },
        "contexts": {
            bucket: _context(responses, name, bucket, seed=seed) for bucket in buckets_present(first_runs)
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


def _group(responses: Sequence[Response], name: str, *, seed: int, greedy: bool) -> Report:
    steps = [steps_of(r, name, 0) for r in responses]
    return {
        "acceptance_length": estimate(acceptance_length(steps), seed=seed).to_dict(),
        "mean_of_prompt_means": mean_of_prompt_means(steps),
        "drafted_tokens": sum(s.drafted for prompt in steps for s in prompt),
        "accepted_tokens": sum(s.accepted for prompt in steps for s in prompt),
        "speed_up": estimate(speed_up(responses, name, greedy=greedy), seed=seed).to_dict(),
        "speed_up_end_to_end": estimate(
            speed_up(responses, name, greedy=greedy, with_prefill=True), seed=seed
        ).to_dict(),
    }


def speed_up(responses: Sequence[Response], name: str, *, greedy: bool, with_prefill: bool = False) -> Ratio:
    """Plain seconds / speculative seconds of the same prompts, the median over repeats of each prompt.

    Sampled responses differ in length, so plain decoding's time is scaled to the tokens of the other
    response.
    """

    def seconds(decoded: Decoded) -> float:
        return decoded.decode_seconds + (decoded.prefill_seconds if with_prefill else 0.0)

    plain, other = _per_prompt(responses, PLAIN, seconds), _per_prompt(responses, name, seconds)
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


def _per_prompt(responses: Sequence[Response], name: str, seconds: Seconds) -> Any:
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


def _context(responses: Sequence[Response], name: str, bucket: str, *, seed: int) -> Report:
    first_runs = in_bucket([steps_of(r, name, 0) for r in responses], bucket)
    speculative = in_bucket([steps_of(r, name) for r in responses], bucket)
    plain = in_bucket([steps_of(r, PLAIN) for r in responses], bucket)
    lengths = [s.context for steps in first_runs for s in steps]
    return {
        "acceptance_length": estimate(acceptance_length(first_runs), seed=seed).to_dict(),
        "break_even": estimate_break_even(break_even(speculative, plain), seed=seed).to_dict(),
        "mean_context": float(np.mean(lengths)),
    }


def _time(responses: Sequence[Response], name: str, *, seed: int, greedy: bool) -> Report:
    steps = [steps_of(r, name) for r in responses]

    def per_step(part: Callable[[Step], float], what: str) -> Report:
        pairs = ((sum(map(part, prompt)), len(prompt)) for prompt in steps)
        return estimate(ratio(pairs, f"{what} seconds / verify steps"), seed=seed).to_dict()

    by_repeat = []
    for repeat in range(len(responses[0].turns[0].runs[name])):
        chosen = [_only(r, repeat) for r in responses]
        by_repeat.append(speed_up(chosen, name, greedy=greedy).value)
    return {
        "draft": per_step(lambda s: s.draft_seconds, "draft"),
        "verify": per_step(lambda s: s.verify_seconds, "verify"),
        "other": per_step(lambda s: s.other_seconds, "other"),
        "prefill_seconds": float(_per_prompt(responses, name, lambda d: d.prefill_seconds).sum()),
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


def _lossless(responses: Sequence[Response], name: str, *, greedy: bool, tie_bound: float) -> Report:
    turns = [(r.prompt, number, turn) for r in responses for number, turn in enumerate(r.turns)]
    if not greedy:
        return {
            "checked": 0,
            "note": "sampled responses are compared as distributions, by the tests of the project",
        }
    found = [
        {"prompt": prompt, "turn": number, **vars(turn.differences[name])}
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


def _comparisons(
    responses: Sequence[Response], names: Sequence[str], *, seed: int, greedy: bool
) -> list[Report]:
    found = []
    for i, second in enumerate(names):
        for first in names[i + 1 :]:
            lengths = [
                acceptance_length([steps_of(r, name, 0) for r in responses]) for name in (first, second)
            ]
            speeds = [speed_up(responses, name, greedy=greedy) for name in (first, second)]
            found.append(
                {
                    "first": first,
                    "second": second,
                    "acceptance_length": compare(*lengths, seed=seed).to_dict(),
                    "speed_up": compare(*speeds, seed=seed).to_dict(),
                }
            )
    return found


def _warnings(report: Report) -> list[str]:
    found = [f"{f['prompt']} failed: {f['error']}" for f in report["prompts"]["failures"]]
    for name, method in report["methods"].items():
        lossless = method["lossless"]
        if lossless.get("failures"):
            found.append(
                f"{name}: {lossless['failures']} of {lossless['checked']} greedy responses differ from plain "
                "decoding by more than rounding"
            )
        for bucket, figures in method["contexts"].items():
            tau, even = figures["acceptance_length"], figures["break_even"]
            if None not in (tau["value"], even["value"]) and tau["value"] < even["value"]:
                found.append(
                    f"{name}: at context {bucket} the acceptance length {tau['value']:.2f} is below "
                    f"break-even {even['value']:.2f}, so it decodes slower than plain decoding there"
                )
    few = {
        bucket: figures["acceptance_length"]["n"]
        for method in report["methods"].values()
        for bucket, figures in method["contexts"].items()
        if figures["acceptance_length"]["n"] < FEW_PROMPTS
    }
    found += [
        f"context {bucket} rests on n = {n}, fewer than {FEW_PROMPTS} prompts" for bucket, n in few.items()
    ]
    return found


def _ordered(responses: Sequence[Response], field: str) -> list[str]:
    return list(dict.fromkeys(getattr(r, field) for r in responses))
