"""What a report says, as sections of text and tables: the one source of `report.md` and `report.html`."""

from __future__ import annotations

from collections.abc import Iterator

from eval.engine_sections import concurrency_section, engine_section
from eval.report_words import (
    Report,
    Section,
    claim_text,
    figure,
    lossless_text,
    milliseconds,
    p_value,
    signed,
)

_PREDICTED = (2, 3, 4, 6, 8, 12, 16)  # acceptance lengths of the table; the picture shows all
_MOST_DIFFERENCES = 20


def heading(report: Report) -> str:
    """What was evaluated, in a sentence."""
    settings, run, prompts = report["settings"], report["run"], report["prompts"]
    return (
        f"Target {settings['target']['name']}, {settings['dtype']}, temperature {settings['temperature']}, "
        f"up to {settings['max_new_tokens']} new tokens; {prompts['n']} prompts, {prompts['turns']} turns of "
        f"{prompts['tokens']['shortest']} to {prompts['tokens']['longest']} tokens; "
        f"{run['hardware']['name']}, {run['hardware']['threads']} threads."
    )


def sections(report: Report) -> Iterator[Section]:
    """All sections that the report has figures for, in the order to read them."""
    if report["warnings"]:
        yield Section("warnings", "Read this first", points=tuple(report["warnings"]))
    yield _methods(report)
    if report["comparisons"]:
        yield _comparisons(report)
    yield _groups(report, "data_sets", "By data set")
    if any(len(m["categories"]) > 1 for m in report["methods"].values()):
        yield _groups(report, "categories", "By category")
    yield _contexts(report)
    yield _predictions(report)
    yield _positions(report)
    yield _time(report)
    if report.get("concurrency"):
        yield concurrency_section(report)
    if report.get("engine"):
        yield engine_section(report)
    if any(m["lossless"].get("differences") for m in report["methods"].values()):
        yield _differences(report)
    yield _run(report)


def _methods(report: Report) -> Section:
    rows = []
    for name, method in report["methods"].items():
        overall = method["overall"]
        tau, share = overall["acceptance_length"], overall["accepted_share"]
        rows.append(
            [
                name,
                figure(tau),
                f"{tau['numerator']:.0f} / {tau['denominator']:.0f}",
                f"{share['numerator']:.0f} of {share['denominator']:.0f}",
                figure(overall["mean_of_prompt_means"]),
                figure(overall["speed_up"]),
                claim_text(overall["claim"]),
                figure(overall["speed_up_end_to_end"]),
                lossless_text(method["lossless"]),
                str(tau["n"]),
            ]
        )
    head = (
        "method", "acceptance length", "emitted tokens / verify steps", "drafts accepted",
        "mean of prompt means", "speed-up, decode", "shown", "speed-up, end to end", "greedy tokens",
        "prompts",
    )  # fmt: skip
    plain = report["plain"]
    return Section(
        "methods",
        "Methods",
        (
            "Figures are `value [95 % interval]`, resampled over prompts.",
            f"Plain decoding takes {milliseconds(plain['seconds_per_token'])} ms a token, and "
            f"{milliseconds(plain['prefill'])} ms to read a prompt.",
        ),
        head,
        rows,
    )


def _comparisons(report: Report) -> Section:
    def cells(c: Report) -> list[str]:
        if c["difference"] is None:
            return ["–"] * 4
        adjusted = c.get("p_value_adjusted")
        return [
            signed(c),
            f"{c['first_higher']} : {c['second_higher']}",
            p_value(c["p_value"]) + ("" if adjusted is None else f"; {p_value(adjusted)}"),
            claim_text(c["claim"]),
        ]

    rows = []
    for pair in report["comparisons"]:
        for label, figures in {"all": pair, **pair["data_sets"]}.items():
            for what, title in (("acceptance_length", "acceptance length"), ("speed_up", "speed-up")):
                n = str(figures[what]["n"])
                rows.append([f"{pair['first']} − {pair['second']}", label, title, *cells(figures[what]), n])
    head = ("pair", "set", "figure", "difference", "higher on", "p; adjusted", "shown", "prompts")
    return Section(
        "comparisons",
        "Differences on the same prompts",
        (
            "First minus second, paired by prompt. `higher on` counts the prompts on which each is the "
            "higher. p is of a permutation test that swaps the two prompt by prompt; the adjusted one allows "
            "for the number of pairs (Holm).",
        ),
        head,
        rows,
    )


def _groups(report: Report, level: str, title: str) -> Section:
    order = list(next(iter(report["methods"].values()))[level])
    rows = [
        [
            group,
            name,
            figure(method[level][group]["acceptance_length"]),
            figure(method[level][group]["speed_up"]),
            claim_text(method[level][group]["claim"]),
            str(method[level][group]["acceptance_length"]["n"]),
        ]
        for group in order
        for name, method in report["methods"].items()
    ]
    head = ("set", "method", "acceptance length", "speed-up", "shown", "prompts")
    return Section(level, title, (), head, rows)


def _contexts(report: Report) -> Section:
    rows = [
        [
            bucket,
            name,
            figure(figures["acceptance_length"]),
            figure(figures["break_even"]),
            figure(figures["speed_up"]),
            milliseconds(figures["time"]["draft"]),
            milliseconds(figures["time"]["verify"]),
            milliseconds(figures["time"]["plain"]),
            _cache_at(method, figures["mean_context"]),
            str(figures["acceptance_length"]["n"]),
        ]
        for name, method in report["methods"].items()
        for bucket, figures in method["contexts"].items()
    ]
    head = (
        "context", "method", "acceptance length", "break-even", "speed-up", "draft, ms", "verify, ms",
        "plain token, ms", "draft cache, MiB", "prompts",
    )  # fmt: skip
    notes = [
        "Break-even = (draft + verify time of a step) / (time of a plain token): below it a drafter costs "
        "time. A step belongs to the bucket of the tokens before it."
    ]
    notes += _cache_texts(report)
    return Section("contexts", "By context length of the step", tuple(notes), head, rows)


def _cache_texts(report: Report) -> list[str]:
    methods: dict[str, list[str]] = {}
    for name, method in report["methods"].items():
        cache = method.get("draft_cache")
        if not cache:
            continue
        text = f"keeps {cache['bytes_per_token']} bytes of draft cache for every token"
        if cache["window_bytes"]:
            text += (
                f" and {cache['window_bytes_per_token']} for those in its sliding windows, at most "
                f"{cache['window_bytes'] / 2**20:.2f} MiB"
            )
        target = cache["target_bytes_per_token"]
        text += "." if target is None else f"; its target keeps {target} bytes for every token."
        methods.setdefault(text, []).append(name)
    return [f"{', '.join(names)}: {text}" for text, names in methods.items()]


def _cache_at(method: Report, context: float) -> str:
    cache = method.get("draft_cache")
    if not cache:
        return "–"
    window = min(context * cache["window_bytes_per_token"], cache["window_bytes"])
    return f"{(context * cache['bytes_per_token'] + window) / 2**20:.1f}"


def _predictions(report: Report) -> Section:
    highest = max(
        (len(c["predicted_speed_up"]) for m in report["methods"].values() for c in m["contexts"].values()),
        default=0,
    )
    taus = [tau for tau in _PREDICTED if tau <= highest]
    rows = []
    for name, method in report["methods"].items():
        for bucket, figures in method["contexts"].items():
            at = {p["acceptance_length"]: figure(p) for p in figures["predicted_speed_up"]}
            rows.append([bucket, name, *(at.get(tau, "–") for tau in taus)])
    return Section(
        "predictions",
        "Speed-up at other acceptance lengths",
        (
            "Acceptance length / break-even: what the measured times of a step would give if more or fewer "
            "drafts were accepted.",
        ),
        ("context", "method", *(f"at {tau}" for tau in taus)),
        rows,
    )


def _positions(report: Report) -> Section:
    rows = [
        [
            str(p["position"]),
            name,
            figure(p["acceptance"]),
            figure(p["conditional"]),
            f"{p['acceptance']['numerator']:.0f} / {p['acceptance']['denominator']:.0f}",
            str(p["acceptance"]["n"]),
        ]
        for name, method in report["methods"].items()
        for p in method["positions"]
    ]
    head = ("position", "method", "all accepted so far", "accepted, given all before", "steps", "prompts")
    return Section("positions", "By draft position", (), head, rows)


def _time(report: Report) -> Section:
    rows = []
    for name, method in report["methods"].items():
        time = method["time"]
        repeats = time["speed_up_by_repeat"]
        spread = f"{repeats['median']:.2f}, {repeats['iqr']:.2f} ({repeats['n']})"
        parts = [milliseconds(time[part]) for part in ("draft", "verify", "other", "prefill")]
        rows.append([name, *parts, spread])
    head = (
        "method", "draft, ms", "verify, ms", "other, ms", "prefill of a prompt, ms",
        "speed-up over repeats: median, IQR (n)",
    )  # fmt: skip
    return Section("time", "Time of a step", (), head, rows)


def _differences(report: Report) -> Section:
    found = [
        [
            name,
            d["prompt"],
            str(d["turn"] + 1),
            str(d["index"]),
            "–" if d["logit_gap"] is None else f"{d['logit_gap']:.5f}",
            "near tie" if d["near_tie"] else "DIFFERS",
        ]
        for name, method in report["methods"].items()
        for d in method["lossless"].get("differences", ())
    ]
    found.sort(key=lambda row: row[-1] == "near tie")
    bound = max(m["lossless"]["tie_bound"] for m in report["methods"].values())
    notes = [
        "The first token at which a greedy response leaves plain decoding's, and the target's logit of plain "
        f"decoding's token minus that of the other. Up to {bound} it counts as a near tie: another order of "
        "the same sum."
    ]
    if len(found) > _MOST_DIFFERENCES:
        notes.append(f"The first {_MOST_DIFFERENCES} of {len(found)}; the others are in report.json.")
    head = ("method", "prompt", "turn", "token", "logit gap", "verdict")
    return Section("differences", "Greedy differences", tuple(notes), head, found[:_MOST_DIFFERENCES])


def _run(report: Report) -> Section:
    settings, run, prompts = report["settings"], report["run"], report["prompts"]
    names = (
        "temperature", "top_p", "top_k", "seed", "repeats", "template_args", "stop", "attention", "prepack",
    )  # fmt: skip
    chosen = ", ".join(f"{key} {settings[key]}" for key in names if key in settings)
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    drafters = ", ".join(f"{name} {digest}" for name, digest in settings["drafters"].items()) or "no drafter"
    return Section(
        "run",
        "How it was run",
        points=(
            f"command: `{' '.join(run['command'])}`",
            f"settings {settings['hash']}: {chosen}",
            f"rendered prompts: hash {prompts['rendered_hash']}; of each prompt in report.json",
            f"weights: target {settings['target']['weights']}, {drafters}",
            f"versions: {versions}; device {run['hardware']['device']}, {run['hardware']['name']}",
            f"took {run['seconds']:.0f} s",
        ),
    )
