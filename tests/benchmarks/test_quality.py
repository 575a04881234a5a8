"""The quality bench with commands that only write what the real ones would."""

import json
from pathlib import Path

import pytest
import yaml

from benchmarks.quality import bench
from benchmarks.quality.prompts import by_temperature, code_prompts, functions, heads, sessions, user_turn
from pipelines.runfile import load_run

RECIPES = Path(bench.__file__).with_name("recipes.yaml")


def test_every_recipe_is_a_valid_run_file(tmp_path):
    baseline, recipes = bench.load_recipes(RECIPES)
    assert baseline in {recipe.name for recipe in recipes}
    files = {}
    (tmp_path / "store-train-math-0").mkdir()
    for recipe in recipes:
        bench.train(recipe, tmp_path, lambda arguments: files.update({arguments[1]: arguments}))
    runs = [load_run(path) for path in files]
    assert len(runs) == len(recipes)
    # equal work for all: steps and samples
    assert len({(run.schedule.steps, run.batch.samples, run.anchors.per_document) for run in runs}) == 1


def test_null_takes_a_key_away_but_not_the_window():
    base = {"drafter": {"version": 2, "selector_rank": 64}, "seed": 1}
    found = bench.changed(base, {"drafter.selector_rank": None, "drafter.sliding_window": None, "a.b": 3})
    assert found == {"drafter": {"version": 2, "sliding_window": None}, "seed": 1, "a": {"b": 3}}
    assert base["drafter"]["selector_rank"] == 64


def test_unknown_recipe_is_refused():
    with pytest.raises(SystemExit, match="no recipe named nonsense"):
        bench.load_recipes(RECIPES, ["nonsense"])


class FakeCommands:
    """Writes results of `train` and `replay` in which recipe b accepts one token more a prompt."""

    def __init__(self):
        self.calls = []

    def __call__(self, arguments):
        self.calls.append(list(arguments))
        if arguments[0] == "train":
            self._write(arguments, {"seconds": 60, "slots_per_second": 10, "train": {}, "validation": {}})
        if arguments[0] == "replay":
            label = arguments[arguments.index("--drafter") + 1].partition("=")[0]
            more = label.startswith("b")
            samples = {f"p{i}": [10 + i % 3 + more, 10] for i in range(30)}
            tau = sum(e for e, _ in samples.values()) / 300
            self._write(
                arguments, {"drafters": {label: {"acceptance_length": {"value": tau}, "samples": samples}}}
            )

    def _write(self, arguments, figures):
        Path(arguments[arguments.index("--json") + 1]).write_text(json.dumps(figures))


def test_bench_compares_recipes_and_a_second_run_replays_nothing(tmp_path):
    recipes = {
        "seeds": [0, 1],
        "baseline": "a",
        "base": {"schedule": {"steps": 5}},
        "recipes": {"a": {}, "b": {}},
    }
    (tmp_path / "recipes.yaml").write_text(yaml.safe_dump(recipes))
    (tmp_path / "prompts").mkdir()
    for name in ("heldout-x", "train-math-0", "train-math-0.7"):
        (tmp_path / "prompts" / f"{name}.jsonl").write_text("")
    arguments = ["--prompts", str(tmp_path / "prompts"), "--out", str(tmp_path / "out")]
    arguments += ["--recipes", str(tmp_path / "recipes.yaml")]
    first = FakeCommands()
    bench.main(first, arguments)
    assert [call[0] for call in first.calls].count("train") == 4
    captured = {Path(c[c.index("--data") + 1]).stem: c for c in first.calls if c[0] == "capture"}
    at = {name: c[c.index("--temperature") + 1] for name, c in captured.items() if "--temperature" in c}
    assert at == {"train-math-0": "0", "train-math-0.7": "0.7"}
    assert "heldout-x" in captured
    assert [call[0] for call in first.calls].count("replay") == 4
    rows = {row["name"]: row for row in json.loads((tmp_path / "out" / "quality.json").read_text())}
    # one more token in each of 10 steps a prompt
    assert rows["b"]["difference"]["difference"] == pytest.approx(0.1)
    assert rows["b"]["difference"]["low"] == pytest.approx(0.1)
    assert rows["b"]["difference"]["p_value"] < 0.01
    assert rows["a"]["difference"] is None
    assert rows["a"]["acceptance"]["n"] == 30
    assert "| b | 1.200 " in (tmp_path / "out" / "quality.md").read_text()
    second = FakeCommands()
    bench.main(second, arguments)
    assert "replay" not in {call[0] for call in second.calls}


def test_code_prompts_ask_about_functions_outside_tests(tmp_path):
    (tmp_path / "a.py").write_text("def f(x):\n    y = x\n    z = y\n    return z\n\n\ndef g():\n    pass\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "b.py").write_text("def h(x):\n    y = x\n    z = y\n    return z\n")
    (tmp_path / "broken.py").write_text("def (")
    assert [source.partition("(")[0] for source in functions(tmp_path)] == ["def f"]
    import random

    (prompt,) = code_prompts([tmp_path], random.Random(0), 5, 5)
    assert "def f(x):" in prompt["prompt"]
    (session,) = sessions([prompt], random.Random(0), 5, turns=3)
    assert len(session["turns"]) == 3
    assert session["turns"][0] == prompt["prompt"]


def test_heads_are_cut_before_the_body_and_keep_the_docstring(tmp_path):
    (tmp_path / "a.py").write_text(
        'def f(x, y=2):\n    """Add.\n\n    More."""\n    return x + y\n\n\n'
        'class C:\n    def g(self):\n        """Say."""\n        return 1\n'
    )
    assert list(heads(tmp_path)) == ['def f(x, y=2):\n    """Add.\n    \n    More.\n    """']


def test_every_prompt_is_answered_once_greedily_or_drawn():
    prompts = [{"prompt": str(i)} for i in range(10)]
    parts = by_temperature(prompts)
    assert {temperature: len(part) for temperature, part in parts.items()} == {0.0: 8, 0.7: 2}
    assert sorted(p["prompt"] for part in parts.values() for p in part) == [str(i) for i in range(10)]


def test_target_writes_after_the_start_of_a_users_turn():
    class Tokenizer:
        def apply_chat_template(self, messages, *, tokenize):
            assert not tokenize
            return f"<s>system\nBe kind.<e>\n<s>user\n{messages[0]['content']}<e>\n"

    assert user_turn(Tokenizer()) == ("<s>system\nBe kind.<e>\n<s>user\n", "<e>")
