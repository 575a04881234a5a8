"""A whole evaluation of a tiny target: report, resume, failures, several turns."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafter.checkpoint import save_drafter
from eval.decode import decode_speculative
from eval.errors import EvalError
from eval.measure import first_difference
from eval.prompts import render
from eval.report_text import render_report
from eval.responses import ResponseFile
from eval.run import EvalOptions, run_eval
from tests.eval.conftest import VOCAB, head_of, tiny_drafter, tiny_model

TEMPLATE = "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' ' }}{% endfor %}a "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny target with a tokenizer whose tokens are words, and two drafters of it."""
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_model("qwen3")
    model.save_pretrained(folder / "target")
    words = ["<unk>", "<eos>", "u", "a", *(f"w{i}" for i in range(VOCAB - 5)), "<mask>"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", mask_token="<mask>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "target")

    from eval.target import Target

    target = Target(model)
    for version in (1, 2):
        drafter = tiny_drafter(target, version=version, dtype="float32")
        save_drafter(drafter, folder / f"v{version}", target_name="tiny", head=head_of(target))
    rows = [{"turns": ["w1 w2 w3 w1 w2", "w5"], "category": "two"}]
    rows += [{"prompt": f"w{i} w7 w8 w{i} w7", "category": "one"} for i in range(5)]
    (folder / "tiny.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Pictures take most of the time of a report; tests/eval/test_report.py draws them."""
    monkeypatch.setattr("eval.plots.write_plots", lambda report, out: [])


@pytest.fixture
def options(checkpoint, tmp_path):
    return EvalOptions(
        target=str(checkpoint / "target"),
        drafter=[f"second={checkpoint / 'v2'}", str(checkpoint / "v1")],
        data=[str(checkpoint / "tiny.jsonl")],
        baseline=["lookup", "v1"],
        max_new_tokens=12,
        device="cpu",
        out=tmp_path / "out",
    )


def lines(options):
    return (options.out / "responses.jsonl").read_text().splitlines()


def test_report_holds_every_method_with_intervals_and_counts(options):
    report = run_eval(options)
    assert list(report["methods"]) == ["lookup", "second", "second as v1", "v1"]
    assert report["prompts"]["n"] == 6
    assert report["prompts"]["turns"] == 7
    for method in report["methods"].values():
        tau = method["overall"]["acceptance_length"]
        assert tau["formula"] == "emitted tokens / verify steps"
        assert tau["value"] == tau["numerator"] / tau["denominator"]
        assert tau["low"] <= tau["value"] <= tau["high"]
        assert method["lossless"]["equal"] == method["lossless"]["checked"] == 7
        assert set(method["categories"]) == {"tiny/two", "tiny/one"}
        assert set(method["contexts"]) == {"0-2K"}
        assert method["overall"]["speed_up"]["value"] > 0
    assert len(report["comparisons"]) == 6
    assert report["settings"]["methods"]["second"] == {"block": 8}
    saved = json.loads((options.out / "report.json").read_text())
    assert saved["schema_version"] == 2
    assert saved["methods"] == report["methods"]
    assert {"report.md", "report.html"} <= {path.name for path in options.out.iterdir()}
    assert render_report(report)


def test_second_turn_follows_the_plain_response_of_the_first(options):
    run_eval(options)
    record = next(r for r in map(json.loads, lines(options)) if len(r["turns"]) == 2)
    first, second = record["turns"]
    # "u <5 words> a", then "<response> u w5 a" and the template's own words around them
    assert first["prompt_tokens"] == 7
    assert second["prompt_tokens"] == 7 + len(first["text"].split()) + 1 + 1 + 1


def test_killed_evaluation_resumes_without_decoding_a_prompt_twice(options, monkeypatch):
    whole = run_eval(options)
    kept = lines(options)
    # Killed in the middle of the fourth line.
    (options.out / "responses.jsonl").write_text("\n".join([*kept[:3], kept[3][:50]]))
    decoded = []

    def counting(target, drafter, prompt, **settings):
        decoded.append(tuple(prompt))
        return decode_speculative(target, drafter, prompt, **settings)

    monkeypatch.setattr("eval.measure.decode_speculative", counting)
    resumed = run_eval(options)
    assert lines(options)[:3] == kept[:3]
    assert len(lines(options)) == 6
    turns = sum(len(json.loads(line)["turns"]) for line in kept[3:])
    assert len(decoded) == 4 * turns + 4  # four methods, and one warm-up
    for name, method in whole["methods"].items():
        assert (
            resumed["methods"][name]["overall"]["acceptance_length"] == method["overall"]["acceptance_length"]
        )


def test_finished_evaluation_returns_its_report_and_loads_no_model(options, monkeypatch):
    report = run_eval(options)
    files = {path: path.stat().st_mtime_ns for path in options.out.iterdir()}
    monkeypatch.setattr("eval.run._set_up", None)
    assert run_eval(options) == json.loads(json.dumps(report))
    assert {path: path.stat().st_mtime_ns for path in options.out.iterdir()} == files
    (options.out / "report.json").unlink()
    again = run_eval(options)
    for name, method in report["methods"].items():
        assert again["methods"][name]["lossless"] == method["lossless"]
        assert again["methods"][name]["positions"] == method["positions"]
    assert (options.out / "report.json").is_file()
    fewer = run_eval(options.model_copy(update={"limit": 2}))
    assert fewer["prompts"]["n"] == 2


def test_baseline_none_leaves_the_drafters(checkpoint, options):
    none = EvalOptions(**{**options.model_dump(), "baseline": ["none"], "limit": 1})
    report = run_eval(none)
    assert list(report["methods"]) == ["second", "v1"]
    with pytest.raises(ValueError, match="beside other baselines"):
        EvalOptions(**{**options.model_dump(), "baseline": ["none", "v1"]})
    with pytest.raises(EvalError, match="nothing to compare"):
        run_eval(none.model_copy(update={"drafter": []}))


def test_folder_that_is_no_drafter_is_named(options, tmp_path):
    with pytest.raises(EvalError, match=f"config.json in {tmp_path}"):
        run_eval(options.model_copy(update={"drafter": [str(tmp_path)]}))


def test_larger_limit_adds_prompts_and_other_settings_start_over(options):
    run_eval(options.model_copy(update={"limit": 3}))
    assert len(lines(options)) == 3
    run_eval(options.model_copy(update={"limit": 5}))
    assert len(lines(options)) == 5
    report = run_eval(options.model_copy(update={"limit": 3, "block": 4}))
    assert len(lines(options)) == 8
    assert max(p["position"] for p in report["methods"]["second"]["positions"]) == 3


def test_bad_prompt_is_reported_and_tried_again_while_the_others_stay(options, tmp_path):
    data = tmp_path / "mixed.jsonl"
    data.write_text('{"prompt": "w1 w2"}\n' + json.dumps({"prompt": "w3 " * 600}) + '\n{"prompt": "w4"}\n')
    options = options.model_copy(update={"data": [str(data)]})
    report = run_eval(options)
    assert report["prompts"]["n"] == 2
    (failure,) = report["prompts"]["failures"]
    assert "lower max_new_tokens or shorten the prompt" in failure["error"]
    assert any("failed" in warning for warning in report["warnings"])
    assert len(run_eval(options)["prompts"]["failures"]) == 1
    assert len(lines(options)) == 4


def test_nothing_that_decodes_is_an_error(options, tmp_path):
    data = tmp_path / "long.jsonl"
    data.write_text(json.dumps({"prompt": "w3 " * 600}))
    with pytest.raises(EvalError, match="none of 1 prompts"):
        run_eval(options.model_copy(update={"data": [str(data)]}))


def test_sampled_evaluation_repeats_itself_and_compares_no_tokens(options):
    sampled = options.model_copy(update={"temperature": 1.0, "limit": 3})
    first = run_eval(sampled)
    again = run_eval(sampled.model_copy(update={"out": options.out / "again"}))
    name = "second"
    assert first["methods"][name]["lossless"]["checked"] == 0
    taus = [r["methods"][name]["overall"]["acceptance_length"] for r in (first, again)]
    assert taus[0] == taus[1]
    assert "scaled to the same number of tokens" in first["methods"][name]["overall"]["speed_up"]["formula"]


def test_repeats_give_a_median_and_a_spread(options):
    report = run_eval(options.model_copy(update={"repeats": 3, "limit": 2}))
    assert report["plain"]["seconds_per_token_by_repeat"]["n"] == 3
    assert report["methods"]["second"]["time"]["speed_up_by_repeat"]["n"] == 3


def test_methods_must_be_told_apart(options, checkpoint):
    with pytest.raises(EvalError, match="share a name"):
        run_eval(options.model_copy(update={"drafter": [f"x={checkpoint / 'v1'}", f"x={checkpoint / 'v2'}"]}))
    with pytest.raises(EvalError, match="nothing to compare"):
        run_eval(options.model_copy(update={"drafter": [], "baseline": []}))


def test_unknown_option_is_refused():
    with pytest.raises(ValueError, match="max_tokens"):
        EvalOptions(target="x", max_tokens=3)


def test_template_arguments_change_settings_and_prompt_hash(options):
    plain = run_eval(options.model_copy(update={"limit": 1, "drafter": []}))
    other = options.model_copy(update={"limit": 1, "drafter": [], "template_args": {"enable_thinking": True}})
    thinking = run_eval(other)
    assert plain["settings"]["hash"] != thinking["settings"]["hash"]
    assert (
        plain["prompts"]["rendered_hash"] == thinking["prompts"]["rendered_hash"]
    )  # this template ignores it


def test_half_a_line_is_cut_off(tmp_path):
    file = ResponseFile(tmp_path / "r.jsonl", "x")
    file.mend()
    file.path.write_text('{"a": 1}\n{"b"')
    file.mend()
    assert file.path.read_text() == '{"a": 1}\n'


def test_difference_beyond_rounding_is_a_failure_and_a_near_tie_is_not(llama):
    prompt = [5, 17, 3]
    with torch.inference_mode():
        order = llama.open().prefill(torch.tensor(prompt)).argsort(descending=True).tolist()
    assert first_difference(llama, prompt, order[:1], order[:1], 1e-3) is None
    wrong = first_difference(llama, prompt, order[:1], order[1:2], 1e-3)
    assert (wrong.index, wrong.near_tie) == (0, False)
    assert wrong.logit_gap == wrong.top_two_gap > 0
    assert first_difference(llama, prompt, order[:1], order[1:2], 1e9).near_tie


def test_target_without_a_template_gets_bare_texts(checkpoint):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint / "target")
    messages = [{"role": "user", "content": "w1 w2"}]
    assert tokenizer.decode(render(tokenizer, messages, {})) == "u w1 w2 a"
    tokenizer.chat_template = None
    assert tokenizer.decode(render(tokenizer, messages, {})) == "w1 w2"


def test_batches_give_the_report_of_single_prompts(options):
    """Six prompts, one of them with two turns, four at a time: same tokens, same steps, times shared out."""
    single = run_eval(options)
    together = run_eval(options.model_copy(update={"batch_size": 4, "out": options.out / "together"}))
    assert together["settings"]["hash"] != single["settings"]["hash"]
    assert together["prompts"] == single["prompts"]
    for name, method in single["methods"].items():
        other = together["methods"][name]
        assert other["overall"]["acceptance_length"] == method["overall"]["acceptance_length"]
        assert other["positions"] == method["positions"]
        assert other["lossless"]["equal"] == other["lossless"]["checked"] == 7
        assert other["overall"]["speed_up"]["value"] > 0


def test_prompt_that_does_not_fit_leaves_its_batch(options, tmp_path):
    data = tmp_path / "mixed.jsonl"
    data.write_text('{"prompt": "w1 w2"}\n' + json.dumps({"prompt": "w3 " * 600}) + '\n{"prompt": "w4"}\n')
    report = run_eval(options.model_copy(update={"data": [str(data)], "batch_size": 3}))
    assert report["prompts"]["n"] == 2
    (failure,) = report["prompts"]["failures"]
    assert "lower max_new_tokens or shorten the prompt" in failure["error"]
