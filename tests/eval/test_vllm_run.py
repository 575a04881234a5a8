"""An evaluation in engines, with the project's own loops in the engines' place: order, resume, figures."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from drafter.checkpoint import load_drafter
from eval.batch import NoDrafter, decode_batch
from eval.block_drafter import BlockDrafter
from eval.decode import Limits
from eval.lookup import LookupDrafter
from eval.run import run_eval
from eval.target import Target
from eval.vllm_engine import EngineFailure, Generated
from eval.vllm_run import Pass, plan
from tests.eval.test_run import checkpoint, options  # noqa: F401 fixtures


def test_order_is_a_palindrome_whose_halves_change_places():
    assert plan(["plain", "a", "b"], 1) == [
        *(Pass(name, 0, 0) for name in ("plain", "a", "b")),
        *(Pass(name, 1, 0) for name in ("b", "a", "plain")),
    ]
    second = plan(["plain", "a", "b"], 2)[6:]
    assert [(step.method, step.half) for step in second] == [
        ("plain", 1), ("a", 1), ("b", 1), ("b", 0), ("a", 0), ("plain", 0),
    ]  # fmt: skip
    for method in ("plain", "a", "b"):
        places = [i for i, step in enumerate(plan(["plain", "a", "b"], 1)) if step.method == method]
        assert sum(places) / len(places) == 2.5


class OwnLoop:
    """`Engine`, made of the project's own loops; its class remembers what was asked of it."""

    started, jobs, fail_after = [], [], None

    def __init__(self, settings, log):
        self.facts = {"vllm": "0.0", "platform": "cpu", "device": "cpu"}
        self._target = Target(AutoModelForCausalLM.from_pretrained(settings.target))
        self.replace(settings, log)

    def replace(self, settings, log):
        self.settings, self.log = settings, log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("started\n")
        type(self).started.append(settings)

    def stop(self):
        type(self).started.append(None)

    def generate(self, prompts, *, limits, sampling, concurrency, seeds=None, keep_drafts=False):
        if OwnLoop.fail_after is not None and len(OwnLoop.jobs) >= OwnLoop.fail_after:
            raise EngineFailure("vLLM failed: hand-made")
        begun = time.perf_counter()
        assert len(prompts) <= concurrency or limits != Limits(8)
        OwnLoop.jobs.append((self.settings.method, concurrency, len(prompts), limits))
        found = []
        for start in range(0, len(prompts), concurrency):
            group = prompts[start : start + concurrency]
            drafter = self._drafter(len(group), sampling)
            found += decode_batch(
                self._target, drafter, group, limits=limits, sampling=sampling, generator=None
            )
        drafted = [s for decoded in found for s in decoded.steps if s.drafted]
        counters = {
            "drafts": len(drafted),
            "draft_tokens": sum(s.drafted for s in drafted),
            "accepted_tokens": sum(s.accepted for s in drafted),
            "accepted_tokens_per_position": [
                sum(s.accepted > place for s in drafted) for place in range(self.settings.drafts)
            ],
        }
        return Generated(found, [[] for _ in found], counters, time.perf_counter() - begun)

    def _drafter(self, slots, sampling):
        if self.settings.method == "plain":
            return NoDrafter()
        block = self.settings.drafts + 1
        if self.settings.method == "ngram":
            return LookupDrafter(block).batched(slots, sampling, None)
        model = load_drafter(Path(self.settings.drafter))
        assert self.settings.candidates == (model.config.version == 2)
        head = self._target.frozen_head
        return BlockDrafter(model, head, name="d", block=block).batched(slots, sampling, None)


@pytest.fixture
def engines(monkeypatch):
    monkeypatch.setattr("eval.vllm_run.Engine", OwnLoop)
    OwnLoop.started, OwnLoop.jobs, OwnLoop.fail_after = [], [], None
    return OwnLoop


@pytest.fixture
def asked(options):  # noqa: F811
    return options.model_copy(update={"backend": "vllm", "concurrency": [1, 3]})


def test_report_has_the_figures_of_both_backends_and_of_every_concurrency(asked, engines):
    report = run_eval(asked)
    own = run_eval(asked.model_copy(update={"backend": "hf", "out": asked.out / "hf"}))
    assert report["prompts"]["rendered_hash"] == own["prompts"]["rendered_hash"]
    assert report["prompts"]["turns"] == 7
    for name, method in own["methods"].items():
        found = report["methods"][name]
        assert found["overall"]["acceptance_length"] == method["overall"]["acceptance_length"]
        assert found["lossless"]["equal"] == found["lossless"]["checked"] == 7
    levels = report["concurrency"]
    assert [level["concurrency"] for level in levels] == [1, 3]
    for level in levels:
        assert list(level["methods"]) == ["plain", *report["methods"]]
        rate = level["methods"]["plain"]["tokens_per_second"]
        assert rate["numerator"] == 7 * 12
        for name in report["methods"]:
            figures = level["methods"][name]
            assert figures["speed_up"]["value"] > 0
            assert figures["acceptance_length"] == report["methods"][name]["overall"]["acceptance_length"]
    counters = report["engine"]["counters"]["second"]
    steps = report["methods"]["second"]["overall"]["acceptance_length"]["denominator"]
    assert counters["drafts"] == steps
    assert counters["acceptance_length"] == 1 + counters["accepted_tokens"] / counters["drafts"]
    assert len(counters["accepted_tokens_per_position"]) == 7
    assert report["engine"]["facts"]["vllm"] == "0.0"
    assert all(Path(log).read_text() for log in report["engine"]["logs"])


def test_one_engine_at_a_time_in_the_planned_order_and_none_left(asked, engines):
    run_eval(asked)
    methods = ["plain", "lookup", "second", "second as v1", "v1"]
    order = [None if s is None else (s.method, Path(s.drafter or "").name) for s in engines.started]
    expected = [
        ("plain", ""), ("ngram", ""), ("dflash", "v2"), ("dflash", "second-as-v1"), ("dflash", "v1"),
        ("dflash", "second-as-v1"), ("dflash", "v2"), ("ngram", ""), ("plain", ""), None,
    ]  # fmt: skip
    assert order == expected
    timed = [job for job in engines.jobs if job[3].max_new_tokens == 12]
    # The first turn of the one conversation, untimed; then 3 or 4 prompts (of 7 turns) at both levels.
    assert timed[0][:3] == ("plain", 3, 1)
    assert sum(job[2] for job in timed[1:]) == 7 * 2 * len(methods)
    assert [job[1] for job in timed[1:3]] == [1, 3]


def test_killed_evaluation_goes_on_with_what_is_missing(asked, engines):
    engines.fail_after = 9
    with pytest.raises(EngineFailure, match="hand-made"):
        run_eval(asked)
    assert engines.started[-1] is None
    kept = (asked.out / "engine_runs.jsonl").read_text().splitlines()
    (asked.out / "engine_runs.jsonl").write_text("\n".join([*kept, '{"settings": "ha']))
    before = {tuple(r["place"]) for r in map(json.loads, kept) if r["kind"] == "answer"}
    engines.fail_after, engines.jobs = None, []
    report = run_eval(asked)
    timed = sum(job[2] for job in engines.jobs if job[3].max_new_tokens == 12)
    assert timed == 7 * 2 * 5 - len(before)
    assert report["prompts"]["n"] == 6
    engines.started.clear()
    assert run_eval(asked) == json.loads(json.dumps(report))
    assert engines.started == []


def test_prompt_that_does_not_fit_is_reported_and_costs_nothing(asked, engines, tmp_path):
    data = tmp_path / "mixed.jsonl"
    data.write_text('{"prompt": "w1 w2"}\n' + json.dumps({"prompt": "w3 " * 600}) + '\n{"prompt": "w4"}\n')
    report = run_eval(asked.model_copy(update={"data": [str(data)], "baseline": []}))
    assert report["prompts"]["n"] == 2
    assert "lower max_new_tokens" in report["prompts"]["failures"][0]["error"]


def test_difference_from_plain_decoding_is_judged_by_the_targets_logits(asked, engines, monkeypatch):
    generate = OwnLoop.generate

    def wrong(self, prompts, **given):
        found = generate(self, prompts, **given)
        if self.settings.method != "ngram" or given["limits"] == Limits(8):
            return found
        first = found.responses[0]
        changed = replace(first, ids=[*first.ids[:-1], (first.ids[-1] + 1) % 90])
        return replace(found, responses=[changed, *found.responses[1:]])

    monkeypatch.setattr(OwnLoop, "generate", wrong)
    report = run_eval(asked.model_copy(update={"concurrency": [1]}))
    lossless = report["methods"]["lookup"]["lossless"]
    assert lossless["failures"] + lossless["near_ties"] == 2  # one in each half
    assert report["methods"]["second"]["lossless"]["equal"] == 7
