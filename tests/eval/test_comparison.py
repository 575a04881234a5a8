"""Two reports: what differs is said first, and figures are paired by the prompts of both."""

import copy
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from eval.comparison import ComparisonError, compare_reports, render_comparison, settings_differences
from eval.options import EvalOptions
from tests.eval import hand_made

ROOT = Path(__file__).resolve().parents[2]
OTHER_TARGET = {"name": "x", "config": "c1", "tokenizer": "t1", "weights": "w9"}
OTHER_CPU = {"device": "cpu", "name": "Other", "threads": 2, "system": "L"}


def save(folder, report):
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(report))
    return folder


@pytest.fixture(scope="module")
def first():
    return hand_made.report()


@pytest.fixture
def second(first):
    return copy.deepcopy(first)


def compare(tmp_path, first, second, allowed=()):
    return compare_reports(save(tmp_path / "1", first), save(tmp_path / "2", second), allowed=allowed, seed=0)


def text_of(comparison):
    console = Console(width=180, file=io.StringIO())
    console.print(render_comparison(comparison))
    return console.file.getvalue()


def test_equal_reports_differ_by_nothing(tmp_path, first, second):
    comparison = compare(tmp_path, first, second)
    assert comparison["settings_differences"] == []
    assert comparison["prompts"] == {
        "both": 24, "first_only": 0, "second_only": 0, "rendered_differently": 0,
    }  # fmt: skip
    for pair in comparison["methods"]:
        assert pair["acceptance_length"]["difference"]["difference"] == 0
        assert pair["acceptance_length"]["difference"]["p_value"] == 1
    assert "equal settings" in text_of(comparison)


def test_figures_of_the_comparison_are_those_of_the_reports(tmp_path, first, second):
    for pair in compare(tmp_path, first, second)["methods"]:
        overall = first["methods"][pair["first"]]["overall"]
        for what in ("acceptance_length", "speed_up"):
            for key in ("value", "low", "high", "n"):
                assert pair[what]["first"][key] == pytest.approx(overall[what][key])


def test_better_drafter_under_the_same_name_needs_permission_and_is_shown(tmp_path, first):
    better = hand_made.report(hand_made.many(weak=((3, 1, 2, 2), (2, 2, 1, 3))))
    better["settings"]["drafters"]["weak"] = "other-weights"
    with pytest.raises(ComparisonError) as refusal:
        compare(tmp_path, first, better)
    assert "drafters.weak: weak-weights against other-weights" in str(refusal.value)
    assert "--allow-differences drafters" in str(refusal.value)
    (tmp_path / "again").mkdir()
    comparison = compare(tmp_path / "again", first, better, allowed=["drafters"])
    pair = next(p for p in comparison["methods"] if p["first"] == "weak")
    length = pair["acceptance_length"]
    # 16 prompts of 12 tokens in 5 steps and 8 in 6 against all in 4 steps.
    assert length["first"]["value"] == pytest.approx(24 * 12 / (16 * 5 + 8 * 6))
    assert length["second"]["value"] == pytest.approx(3.0)
    assert length["difference"]["difference"] == pytest.approx(3.0 - 288 / 128)
    assert length["difference"]["claim"]["text"] == "higher"
    assert length["difference"]["p_value_adjusted"] >= length["difference"]["p_value"]
    text = text_of(comparison)
    assert text.index("other-weights") < text.index("+0.75 [")


@pytest.mark.parametrize(
    ("part", "change", "key"),
    [
        ("settings", {"temperature": 1.0}, "temperature"),
        ("settings", {"template_args": {"enable_thinking": True}}, "template_args.enable_thinking"),
        ("settings", {"target": OTHER_TARGET}, "target.weights"),
        ("settings", {"methods": {"strong": {"block": 8}, "weak": {"block": 4}}}, "methods.strong.block"),
        ("run", {"versions": {"python": "3.11", "torch": "2.14", "code": "f00"}}, "versions.torch"),
        ("run", {"hardware": OTHER_CPU}, "hardware.name"),
    ],
)  # fmt: skip
def test_setting_that_changes_figures_is_refused_by_name(tmp_path, first, second, part, change, key):
    second[part] |= change
    with pytest.raises(ComparisonError, match=rf"  {key}: "):
        compare(tmp_path, first, second)
    (tmp_path / "again").mkdir()
    assert compare(tmp_path / "again", first, second, allowed=["all"])["methods"]


def test_permission_for_one_setting_is_none_for_another(tmp_path, first, second):
    second["settings"]["temperature"] = 1.0
    second["settings"]["top_k"] = 20
    with pytest.raises(ComparisonError) as refusal:
        compare(tmp_path, first, second, allowed=["temperature"])
    assert "top_k: 0 against 20" in str(refusal.value)
    assert "temperature:" not in str(refusal.value)


def test_what_changes_no_figure_is_shown_and_not_refused(tmp_path, first, second):
    second["settings"]["target"] = {**second["settings"]["target"], "name": "elsewhere/target"}
    second["run"]["versions"] = {**second["run"]["versions"], "code": "b00"}
    second["settings"]["hash"] = "other"
    comparison = compare(tmp_path, first, second)
    assert {d["key"] for d in comparison["settings_differences"]} == {"target.name", "versions.code"}
    assert "changes no figure" in text_of(comparison)


def test_only_prompts_of_both_are_compared_and_the_others_counted(tmp_path, first):
    new = hand_made.response("new", {"strong": [3], "weak": [3]})
    fewer = hand_made.report([*hand_made.many()[:20], new])
    fewer["by_prompt"][0]["hash"] = "same text, other template"
    comparison = compare(tmp_path, first, fewer)
    assert comparison["prompts"] == {
        "both": 19, "first_only": 5, "second_only": 2, "rendered_differently": 1,
    }  # fmt: skip
    assert all(p["speed_up"]["first"]["n"] == 19 for p in comparison["methods"])
    assert "1 of these are the same text with other token ids" in text_of(comparison)


def test_pairing_is_by_prompt_whatever_the_order(tmp_path, first, second):
    second["by_prompt"].reverse()
    comparison = compare(tmp_path, first, second)
    assert comparison["methods"][0]["acceptance_length"]["difference"]["difference"] == 0


def test_no_common_prompt_is_an_error_that_says_why(tmp_path, first, second):
    for row in second["by_prompt"]:
        row["hash"] += "x"
    with pytest.raises(ComparisonError, match="24 are the same text rendered to other token ids"):
        compare(tmp_path, first, second)


def test_methods_of_other_names_are_compared_with_each_other(tmp_path, first):
    responses = [hand_made.response(f"p{i}", {"strong": (3, 3, 3), "third": (2, 2, 2, 2)}) for i in range(20)]
    comparison = compare(tmp_path, first, hand_made.report(responses))
    assert [(p["first"], p["second"]) for p in comparison["methods"]] == [
        ("strong", "strong"),
        ("weak", "third"),
    ]


def test_missing_report_and_other_schema_are_named(tmp_path, first):
    good = save(tmp_path / "good", first)
    with pytest.raises(ComparisonError, match=r"expected a report\.json at .*nowhere"):
        compare_reports(good, tmp_path / "nowhere", allowed=(), seed=0)
    old = save(tmp_path / "old", {"schema_version": 1})
    with pytest.raises(ComparisonError, match="schema version 1, expected 2"):
        compare_reports(good, old, allowed=(), seed=0)


def test_settings_of_a_method_that_only_one_report_has_are_no_difference(first, second):
    second["settings"]["drafters"]["third"] = "w"
    second["settings"]["methods"]["third"] = {"block": 16}
    assert settings_differences(first, second) == []


def test_an_evaluation_needs_a_target_or_two_reports():
    with pytest.raises(ValueError, match="--target: expected a checkpoint"):
        EvalOptions()
    assert EvalOptions(compare=("a", "b")).target == ""


def test_command_line_refuses_with_exit_code_2_and_compares_when_told(tmp_path, first, second):
    one, other = save(tmp_path / "1", first), tmp_path / "2"
    second["settings"]["temperature"] = 1.0
    save(other, second)
    out = tmp_path / "c.json"

    def call(*flags):
        return subprocess.run(
            [sys.executable, str(ROOT / "cli.py"), "eval", *flags],
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip

    pair = ("--compare", str(one), str(other), "--json", str(out))
    refused = call(*pair)
    assert refused.returncode == 2
    assert "temperature: 0.0 against 1.0" in refused.stderr
    done = call(*pair, "--allow-differences", "temperature")
    assert done.returncode == 0, done.stderr
    assert "What differs" in done.stdout
    assert json.loads(out.read_text())["prompts"]["both"] == 24
