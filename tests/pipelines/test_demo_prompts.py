import json

from pipelines.demo_prompts import WORDS, demo_prompts, write_demo_prompts


def test_splits_share_no_prompt_and_no_content():
    train = {p["prompt"] for p in demo_prompts("train")}
    heldout = {p["prompt"] for p in demo_prompts("heldout")}
    assert len(train) > 400
    assert len(heldout) > 80
    assert not train & heldout
    for kind, lists in WORDS["train"].items():
        for name, words in lists.items():
            if isinstance(words, list):
                assert not set(words) & set(WORDS["heldout"][kind][name]), (kind, name)


def test_seed_changes_the_order_and_not_the_set():
    first, second = demo_prompts("train", 0), demo_prompts("train", 1)
    assert first != second
    assert {p["prompt"] for p in first} == {p["prompt"] for p in second}


def test_prefix_of_a_split_holds_every_kind():
    assert {p["category"] for p in demo_prompts("heldout")[:12]} == {"code", "math", "chat"}


def test_writing_twice_does_nothing_the_second_time(tmp_path):
    counts = write_demo_prompts(tmp_path)
    before = (tmp_path / "train.jsonl").stat().st_mtime_ns
    assert write_demo_prompts(tmp_path) == counts
    assert (tmp_path / "train.jsonl").stat().st_mtime_ns == before
    rows = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text().splitlines()]
    assert len(rows) == counts["heldout"]
