"""The tables of the proof at length, on files with known figures; and that every script still imports."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from benchmarks.long_context import table

ROOT = Path(table.__file__).parents[1]
SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_imports(name, monkeypatch):
    """As when it is run: from its own folder."""
    path = ROOT / name
    monkeypatch.syspath_prepend(path.parent)
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert module.__doc__


def steps(count, drafted, accepted, emitted, draft, verify):
    return [[10 + i * emitted, drafted, accepted, emitted, draft, verify, 0.0] for i in range(count)]


def test_break_even_of_a_length_is_step_time_over_plain_token_time(tmp_path):
    """12 tokens in 6 steps of 30 ms, plain tokens of 20 ms: break-even 1.5, acceptance length 2."""
    runs = {
        "plain": [{"steps": steps(12, 0, 0, 1, 0.0, 0.02)}],
        "mixed": [{"steps": steps(6, 3, 1, 2, 0.01, 0.02)}],
    }
    line = {"dataset": "ctx-00512", "error": None, "turns": [{"runs": runs}]}
    broken = {"dataset": "ctx-00512", "error": "too long", "turns": []}
    (tmp_path / "responses.jsonl").write_text("\n".join(map(json.dumps, [line, line, broken])))
    found = table.timing(tmp_path)["ctx-00512"]
    assert found["mixed"]["n"] == 2
    assert found["mixed"]["break_even"]["value"] == pytest.approx(1.5)
    assert found["mixed"]["acceptance_length"]["value"] == pytest.approx(2.0)
    assert found["plain_seconds_per_token"]["value"] == pytest.approx(0.02)


@pytest.mark.parametrize(("ids", "share"), [([1, 2, 3, 4] * 5, 4 / 17), (list(range(20)), 1.0), ([1], 1.0)])
def test_share_of_distinct_grams_tells_loops(ids, share):
    assert table.distinct_share(ids) == pytest.approx(share)
