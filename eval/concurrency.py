"""What engines gave at every number of requests in flight, and what their own counters say.

Shape of `report["concurrency"]`: a list, fewest requests first, of
`{"concurrency": n, "methods": {name: figures}}`, plain decoding among the methods. Figures are estimates with
interval and n: `tokens_per_second`; for all but plain also `speed_up` (decode seconds), `speed_up_end_to_end`
and `acceptance_length`.

Shape of `report["engine"]`: `facts` (version of vLLM, platform, device), `logs` (files), `jobs` (how many
engine runs), and `counters`: per method the sums of vLLM's own counters at the smallest concurrency, with
`acceptance_length` = 1 + accepted tokens / drafts as vLLM defines it. That differs from the project's figure
in what it leaves out: steps without a draft, and the cut of a last step that went past the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from eval.breakdowns import per_prompt, speed_up
from eval.engine_runs import Job, RunFile
from eval.metrics import Ratio, acceptance_length
from eval.options import EvalOptions
from eval.responses import PLAIN, Response, steps_of
from eval.statistics import estimate
from eval.vllm_run import at_level

Report = dict[str, Any]


def engine_figures(file: RunFile, responses: Sequence[Response], options: EvalOptions) -> Report:
    """The parts of the report that only an engine evaluation has: `concurrency` and `engine`."""
    answers, jobs = file.answers(), file.jobs()
    greedy = options.temperature <= 0
    levels = []
    for level in sorted(set(options.concurrency)):
        there = at_level(responses, answers, level, options.repeats)
        methods = {
            name: _figures(there, name, seed=options.seed, greedy=greedy) for name in there[0].turns[0].runs
        }
        levels.append({"concurrency": level, "methods": methods})
    return {
        "concurrency": levels,
        "engine": {
            "facts": jobs[-1].facts,
            "logs": sorted({job.log for job in jobs}),
            "jobs": len(jobs),
            "counters": _counters(job for job in jobs if job.concurrency == min(options.concurrency)),
        },
    }


def _figures(responses: Sequence[Response], name: str, *, seed: int, greedy: bool) -> Report:
    found = {"tokens_per_second": estimate(tokens_per_second(responses, name), seed=seed).to_dict()}
    if name == PLAIN:
        return found
    return {
        **found,
        "speed_up": estimate(speed_up(responses, name, greedy=greedy), seed=seed).to_dict(),
        "speed_up_end_to_end": estimate(
            speed_up(responses, name, greedy=greedy, with_prefill=True), seed=seed
        ).to_dict(),
        "acceptance_length": estimate(
            acceptance_length([steps_of(r, name, 0) for r in responses]), seed=seed
        ).to_dict(),
    }


def tokens_per_second(responses: Sequence[Response], name: str) -> Ratio:
    """Tokens of the engine a second: a step's time is shared out among the requests in flight."""
    repeats = len(responses[0].turns[0].runs[name])
    tokens = np.array(
        [sum(len(run.ids) for turn in r.turns for run in turn.runs[name]) / repeats for r in responses]
    )
    seconds = per_prompt(responses, name, lambda decoded: decoded.decode_seconds + decoded.prefill_seconds)
    return Ratio(tokens, seconds, "response tokens / engine seconds, prefill included")


def _counters(jobs: Iterable[Job]) -> Report:
    """Sums of vLLM's counters by method."""
    sums: dict[str, Report] = {}
    for job in jobs:
        if job.method == PLAIN:
            continue
        total = sums.setdefault(job.method, {})
        for name, value in job.counters.items():
            if isinstance(value, list):
                before = total.get(name, [0] * len(value))
                total[name] = [a + b for a, b in zip(before, value, strict=True)]
            else:
                total[name] = total.get(name, 0) + value
    for total in sums.values():
        drafts = total["drafts"]
        total["acceptance_length"] = 1 + total["accepted_tokens"] / drafts if drafts else None
    return sums
