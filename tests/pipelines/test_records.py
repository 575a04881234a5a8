from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.records import DataSourceError, Record, RecordError, Rejection, parse_record, read_records

USER = {"role": "user", "content": "hi"}
TWO = ["user", "assistant"]
ANSWER = {"role": "assistant", "content": "hello"}


def _lines(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("raw", "roles"),
    [
        ({"messages": [USER, ANSWER]}, ["user", "assistant"]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, TWO),
        ({"prompt": "p"}, ["user"]),
        ({"prompt": "p", "response": "r"}, ["user", "assistant"]),
        ({"prompt": [{"role": "system", "content": "s"}, USER]}, ["system", "user"]),
        ({"turns": ["one", "two"]}, ["user", "user"]),
        ({"question": "q", "answer": "a"}, ["user", "assistant"]),
    ],
)  # fmt: skip
def test_every_form_becomes_messages(raw: dict[str, Any], roles: list[str]) -> None:
    assert [message["role"] for message in parse_record(raw).messages] == roles


def test_plain_text_is_kept_as_text() -> None:
    assert parse_record({"text": "some text"}).text == "some text"


@pytest.mark.parametrize("role", ["foo", "Assistant", "moderator"])
def test_unknown_role_is_refused(role: str) -> None:  # A7
    with pytest.raises(RecordError, match="unknown role"):
        parse_record({"messages": [USER, {"role": role, "content": "x"}]})


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
def test_context_roles_are_known(role: str) -> None:  # A7: known, and never supervised (test_records_masks)
    assert parse_record({"messages": [{"role": role, "content": "x"}, USER, ANSWER]})


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ([], "expected an object"),
        ({"other": 1}, "expected one of the keys"),
        ({"messages": []}, "at least one entry"),
        ({"messages": [{"role": "user", "content": 3}]}, "content must be text"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no message with role user"),
        ({"messages": ["x"]}, "expected an object with role"),
        ({"text": ""}, "expected one of the keys"),
    ],
)
def test_unusable_record_says_why(raw: Any, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        parse_record(raw)


def test_bad_lines_are_listed_by_file_and_line_and_the_rest_goes_on(tmp_path: Path) -> None:
    path = _lines(
        tmp_path / "a.jsonl",
        {"prompt": "one"},
        "{broken",
        "",
        {"messages": [{"role": "x"}]},
        {"prompt": "two"},
    )
    found = list(read_records([path]))
    assert [item.line for item in found] == [1, 2, 4, 5]
    rejected = [item for item in found if isinstance(item, Rejection)]
    assert [(item.source, item.line) for item in rejected] == [(path, 2), (path, 4)]
    assert "not valid JSON" in rejected[0].reason


def test_broken_utf8_is_one_rejection(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n{"prompt": "fine"}\n')
    first, second = read_records([str(path)])
    assert isinstance(first, Rejection)
    assert isinstance(second, Record)


def test_id_is_content_not_position(tmp_path: Path) -> None:  # E4, E5
    one = _lines(tmp_path / "one.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    other = _lines(tmp_path / "other.jsonl", {"prompt": "c"}, {"prompt": "a"}, {"prompt": "b"})
    ids = [{item.messages[0]["content"]: item.id for item in read_records([path])} for path in (one, other)]  # type: ignore[union-attr]
    assert ids[0] == ids[1]
    assert len(set(ids[0].values())) == 3


def test_folder_json_and_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    _lines(tmp_path / "a.jsonl", {"prompt": "one"})
    (tmp_path / "b.json").write_text(json.dumps([{"prompt": "two"}, {"prompt": "three"}]))
    rows = [{"messages": [USER, ANSWER]}, {"messages": [{**USER, "name": "n"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    found = list(read_records([str(tmp_path)]))
    assert all(isinstance(item, Record) for item in found)
    assert len(found) == 5
    assert "name" not in found[3].messages[0]  # type: ignore[union-attr]


def test_limit_counts_usable_records(tmp_path: Path) -> None:
    path = _lines(tmp_path / "a.jsonl", "{", {"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"})
    found = list(read_records([path], limit=2))
    assert sum(isinstance(item, Record) for item in found) == 2


def test_missing_source_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataSourceError, match="does not exist"):
        list(read_records([str(tmp_path / "none.jsonl")]))
    with pytest.raises(DataSourceError, match="holds no"):
        list(read_records([str(tmp_path)]))
