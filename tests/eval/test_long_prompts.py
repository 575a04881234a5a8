"""Long prompts: their length in the target's tokens, what they are made of, that they repeat themselves."""

import json
import re
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eval.contexts import bucket_names, length_name, parse_contexts
from eval.errors import EvalError
from eval.long_kinds import TOLERANCE, edit_request
from eval.long_prompts import LongPromptOptions, render_long_prompts, write_long_prompts
from eval.prompts import load_prompts, render
from pipelines.target import load_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>\n{% endfor %}<assistant>"
FUNCTION = "def add_{i}(left, right):\n    total_{i} = left + right * {i}\n    return total_{i}\n\n\n"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A checkpoint without weights: bytes are tokens, and some pairs of them merge, so that cuts matter."""
    folder = tmp_path_factory.mktemp("target")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("t", "o"),
        ("to", "t"),
        ("a", "l"),
        ("tot", "al"),
        ("d", "e"),
        ("de", "f"),
        ("Ġ", "r"),
        ("e", "t"),
    ]
    vocabulary = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8192, "model_type": "llama"}))
    return folder


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """A folder of source files, with something that is no text and something hidden among them."""
    folder = tmp_path_factory.mktemp("code")
    for number in range(6):
        text = "".join(FUNCTION.replace("{i}", str(100 * number + i)) for i in range(120))
        (folder / f"module_{number}.py").write_text(text)
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden " * 9000)
    return folder


def make(target, data, out, **options):
    given = {"contexts": "1k,2k", "per_context": 2, **options}
    result = write_long_prompts(LongPromptOptions(target=str(target), data=[str(data)], out=out, **given))
    return result, [json.loads(line) for line in out.read_text().splitlines()]


def test_every_prompt_has_its_length_when_the_evaluation_renders_it(target, code, tmp_path):
    result, records = make(target, code, tmp_path / "long.jsonl")
    assert result["prompts"] == len(records) == 4 * 2 * 2
    assert result["reused"] == 0
    tokenizer = load_tokenizer(target)
    prompts = {p.id: p for p in load_prompts(str(tmp_path / "long.jsonl"), limit=None, seed=0)}
    for record in records:
        prompt = prompts[f"long/{record['id']}"]
        messages = [*prompt.history, {"role": "user", "content": prompt.turns[0]}]
        rendered = len(render(tokenizer, messages, {}))
        assert rendered == record["tokens"]
        assert abs(rendered - record["context"]) <= TOLERANCE
        assert prompt.category == record["category"]
    assert {r["context"] for r in records} == {1024, 2048}
    assert render_long_prompts(result)


def test_same_seed_gives_the_same_file_and_another_seed_another(target, code, tmp_path):
    make(target, code, tmp_path / "a.jsonl", seed=3)
    make(target, code, tmp_path / "b.jsonl", seed=3)
    make(target, code, tmp_path / "c.jsonl", seed=4)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert (tmp_path / "a.jsonl").read_bytes() != (tmp_path / "c.jsonl").read_bytes()


def test_a_finished_file_is_left_alone(target, code, tmp_path):
    out = tmp_path / "long.jsonl"
    make(target, code, out)
    before = out.stat().st_mtime_ns
    make(target, code, out)
    assert out.stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == ["long.jsonl"]


def test_no_two_prompts_share_a_passage_and_sources_say_where_it_is(target, code, tmp_path):
    _, records = make(target, code, tmp_path / "long.jsonl", kind=["continue"], per_context=4)
    used = {}
    for record in records:
        for source in record["sources"]:
            used.setdefault(source["name"], []).append((source["start"], source["end"]))
            text = (code.parent / source["name"]).read_text()[source["start"] : source["end"]]
            assert text in record["messages"][0]["content"]
    assert all(name.endswith(".py") for name in used)
    for spans in used.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(spans)))


def test_text_that_runs_out_is_dealt_again_and_said_so(target, code, tmp_path, caplog):
    (tmp_path / "one.py").write_text((code / "module_0.py").read_text())
    result, records = make(
        target, tmp_path / "one.py", tmp_path / "o.jsonl", kind=["continue"], per_context=9
    )
    assert 0 < result["reused"] < len(records)
    assert any("share text" in message for message in caplog.messages)


def test_short_files_are_joined_under_their_names(target, tmp_path):
    for number in range(40):
        (tmp_path / f"f{number}.txt").write_text(f"note {number} " * 8)
    _, (record,) = make(
        target, tmp_path, tmp_path / "o.jsonl", kind=["continue"], contexts="1k", per_context=1
    )
    assert len(record["sources"]) > 5
    for source in record["sources"][:-1]:
        assert f"# {source['name']}\n" in record["messages"][0]["content"]


def test_needles_lie_at_depths_spread_over_the_context(target, code, tmp_path):
    _, records = make(target, code, tmp_path / "n.jsonl", kind=["needle"], contexts="2k", per_context=4)
    found = []
    for record in records:
        content = record["messages"][0]["content"]
        assert content.count(record["expected"]) == 1
        thing = re.search(r"code of the (.+?) is", record["expected"])[1]
        assert content.endswith(f"code of the {thing}? Answer with the whole sentence from the text above.")
        found.append(content.index(record["expected"]) / len(content))
    assert [r["depth"] for r in records] == [0.125, 0.375, 0.625, 0.875]
    assert found == pytest.approx([0.125, 0.375, 0.625, 0.875], abs=0.08)


def test_copied_passage_stands_between_its_marks_and_the_request_names_it(target, code, tmp_path):
    _, records = make(target, code, tmp_path / "c.jsonl", kind=["copy"], contexts="2k", per_context=3)
    for record in records:
        content = record["messages"][0]["content"]
        number = re.search(r"\[passage (\d+)\]\n", content)[1]
        inside = content.split(f"[passage {number}]\n")[1].split(f"[end of passage {number}]\n")[0]
        assert inside == record["expected"]
        assert len(inside) > 150
        assert f"between [passage {number}]" in content.splitlines()[-1]


def test_edit_names_a_function_that_the_text_defines_once(target, code, tmp_path):
    _, records = make(target, code, tmp_path / "e.jsonl", kind=["edit"])
    for record in records:
        content = record["messages"][0]["content"]
        name = re.search(r"Write the function `(\w+)`", content)[1]
        assert content.count(f"def {name}(") == 1


def test_edit_of_prose_names_a_paragraph():
    import random

    text = "First of all we went down to the sea.\n\nThen it began to rain and we turned back.\n\nEnd."
    assert "begins with “" in edit_request(text, random.Random(0))
    assert "last paragraph" in edit_request("short", random.Random(0))


def session(turns, words):
    messages = [{"role": "system", "content": "You are brief."}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn} " + f"u{turn} " * words})
        messages.append({"role": "assistant", "content": f"answer {turn} " + f"a{turn} " * words})
    return {"messages": messages}


def test_session_is_cut_to_its_length_and_ends_with_a_user_message(target, tmp_path):
    data = tmp_path / "sessions.jsonl"
    data.write_text("\n".join(json.dumps(session(8, 30 + i)) for i in range(6)))
    _, records = make(target, data, tmp_path / "s.jsonl", kind=["session"], contexts="1k", per_context=3)
    assert len({json.dumps(r["sources"]) for r in records}) == 3
    for record in records:
        messages = record["messages"]
        assert messages[0] == {"role": "system", "content": "You are brief."}
        assert messages[-1]["role"] == "user"
        assert abs(record["tokens"] - 1024) <= TOLERANCE


def test_conversations_too_short_for_a_session_are_an_error(target, tmp_path):
    data = tmp_path / "sessions.jsonl"
    data.write_text(json.dumps(session(1, 5)))
    with pytest.raises(EvalError, match="conversation of at least 1024 tokens"):
        make(target, data, tmp_path / "s.jsonl", kind=["session"], contexts="1k")
    data.write_text(json.dumps({"text": "no conversation " * 500}))
    with pytest.raises(EvalError, match="needs records with messages"):
        make(target, data, tmp_path / "s.jsonl", kind=["session"], contexts="1k")


def test_lengths_that_do_not_fit_are_refused_before_anything_is_read(target, code, tmp_path):
    with pytest.raises(EvalError, match="8192 positions"):
        make(target, code, tmp_path / "o.jsonl", contexts="8k")
    (tmp_path / "small.txt").write_text("too little")
    with pytest.raises(EvalError, match="fewer tokens; add --data"):
        make(target, tmp_path / "small.txt", tmp_path / "o.jsonl", contexts="1k")
    with pytest.raises(EvalError, match="its request and template alone"):
        make(target, code, tmp_path / "o.jsonl", contexts="60", kind=["needle"])
    with pytest.raises(EvalError, match="there is none"):
        make(target, tmp_path / "nowhere", tmp_path / "o.jsonl")
    assert not (tmp_path / "o.jsonl").exists()


def test_standard_library_is_a_source(target, tmp_path):
    _, records = make(target, "stdlib", tmp_path / "o.jsonl", kind=["continue"], contexts="4k", per_context=1)
    (source,) = records[0]["sources"]
    assert re.fullmatch(r"python3\.\d+/.*\.py", source["name"])


def test_context_lengths_are_written_in_units_of_1024():
    assert parse_contexts("8k, 2K,512,1m,1.5k") == (512, 1536, 2048, 8192, 1_048_576)
    assert [length_name(n) for n in (512, 1536, 2048, 1_048_576, 3000)] == ["512", "1.5K", "2K", "1M", "3000"]
    assert bucket_names((2048, 4096)) == ["0-2K", "2-4K", "over 4K"]
    for wrong in ("", "2k,", "many", "0", "-1k"):
        with pytest.raises(EvalError, match="expected items such as"):
            parse_contexts(wrong)
