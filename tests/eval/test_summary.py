"""The table that a whole job ends with."""

import io
import json

import pytest
from rich.console import Console

from eval.errors import EvalError
from eval.summary import STAGES, render_summary, summarise


def estimate(value, low, high):
    return {"value": value, "low": low, "high": high}


def job(folder, failures=0):
    (folder / "report").mkdir()
    method = {
        "overall": {"acceptance_length": estimate(1.5, 1.4, 1.6), "speed_up": estimate(0.9, 0.8, 1.0)},
        "positions": [{"acceptance": {"value": 0.4}}, {"acceptance": {"value": None}}],
        "contexts": {"0-2K": {"break_even": estimate(1.8, 1.7, 1.9)}},
        "lossless": {"checked": 3, "equal": 3 - failures, "near_ties": 0, "failures": failures},
    }
    report = {"prompts": {"n": 3}, "methods": {"mine": method}}
    (folder / "report" / "report.json").write_text(json.dumps(report))
    for number, stage in enumerate(STAGES, start=1):
        (folder / f"{stage}.json").write_text(json.dumps({"command_seconds": 60.0 * number}))


def text_of(folder):
    console = Console(width=140, file=io.StringIO())
    console.print(render_summary(summarise(folder)))
    return console.file.getvalue()


def test_summary_shows_every_figure_with_its_interval_and_the_minutes_of_every_stage(tmp_path):
    job(tmp_path)
    text = text_of(tmp_path)
    for figure in ("1.50 [1.40, 1.60]", "0.90 [0.80, 1.00]", "1.80 [1.70, 1.90] at 0-2K", "0.40 –"):
        assert figure in text
    assert "yes (3/3 equal)" in text
    assert "target 1.0, capture 2.0, train 3.0, eval 4.0; 10.0 in all" in text


def test_summary_does_not_call_a_different_output_lossless(tmp_path):
    job(tmp_path, failures=1)
    assert "no (2/3 equal, 1 DIFFER)" in text_of(tmp_path)


def test_missing_stage_is_named(tmp_path):
    job(tmp_path)
    (tmp_path / "train.json").unlink()
    with pytest.raises(EvalError, match=r"`train`.*train\.json"):
        summarise(tmp_path)
