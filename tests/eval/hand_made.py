"""Responses and reports whose figures can be worked out by hand."""

from eval.decode import Decoded, Step
from eval.report import build_report
from eval.responses import PLAIN, Difference, Response, Turn

PLAIN_SECONDS = 0.010
DRAFT_SECONDS, VERIFY_SECONDS, OTHER_SECONDS = 0.005, 0.015, 0.001


def plain_run(context, tokens):
    steps = [Step(context + i, 0, 0, 1, 0.0, PLAIN_SECONDS, 0.0) for i in range(tokens)]
    return Decoded(list(range(tokens + 1)), 0.1, steps)


def run(context, accepted, drafted=3):
    """A response whose steps accepted these numbers of drafts."""
    steps = []
    for count in accepted:
        times = (DRAFT_SECONDS, VERIFY_SECONDS, OTHER_SECONDS)
        steps.append(Step(context, drafted, count, count + 1, *times))
        context += count + 1
    return Decoded(list(range(sum(accepted) + len(accepted) + 1)), 0.2, steps)


def response(name, runs, *, context=500, dataset="code", category="one", differences=None):
    """One prompt; `runs` are the accepted drafts of each method's steps, which emit equally many tokens."""
    tokens = {sum(accepted) + len(accepted) for accepted in runs.values()}
    assert len(tokens) == 1, "methods emit the same tokens"
    decoded = {PLAIN: [plain_run(context, tokens.pop())]}
    decoded |= {method: [run(context, accepted)] for method, accepted in runs.items()}
    turn = Turn(context, f"hash-{name}", "text", decoded, differences or {})
    return Response(name, f"key-{name}", dataset, category, [turn])


def many(prompts=24, weak=((1, 2, 1, 1, 2), (1, 2, 0, 1, 1, 1))):
    """Prompts of two data sets and two contexts, 12 tokens each; `strong` accepts nearly all drafts."""
    found = []
    for i in range(prompts):
        usual = i % 3 != 0  # prompts differ, so that resamples do
        runs = {"strong": (3, 3, 3) if usual else (3, 3, 1, 1), "weak": weak[0] if usual else weak[1]}
        place = {"dataset": "code" if i < prompts // 2 else "chat", "category": "one" if i % 4 else "two"}
        found.append(response(f"p{i}", runs, context=500 if i % 2 else 3000, **place))
    return found


def report(responses=None, **options):
    """A whole report, with settings and machine, as `run_eval` puts them."""
    responses = many() if responses is None else responses
    methods = list(responses[0].turns[0].runs)
    given = {"seed": 0, "greedy": True, "tie_bound": 1e-3, **options}
    built = build_report(responses, [], methods=methods, **given)
    built["settings"] = {
        "hash": "abc",
        "target": {"name": "runs/target", "config": "c1", "tokenizer": "t1", "weights": "w1"},
        "drafters": {name: f"{name}-weights" for name in methods if name != PLAIN},
        "methods": {name: {"block": 4} for name in methods if name != PLAIN},
        "dtype": "float32", "temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 64, "seed": 0,
        "repeats": 1, "template_args": {}, "stop": True, "attention": "folded", "prepack": True,
        "baseline": [], "device": "cpu", "threads": 2, "backend": "hf",
    }  # fmt: skip
    built["run"] = {
        "command": ["longdraft", "eval", "--target", "runs/target"],
        "out": "runs/report",
        "seconds": 12.0,
        "hardware": {"device": "cpu", "name": "Some CPU", "threads": 2, "cores": 2, "system": "Linux"},
        "versions": {"python": "3.11", "torch": "2.13", "code": "f00"},
    }
    return built


def difference(near_tie):
    return Difference(index=3, logit_gap=0.0002 if near_tie else 1.5, top_two_gap=0.0002, near_tie=near_tie)
