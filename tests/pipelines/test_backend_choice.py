"""What `parallel.attention_backend: auto` takes on a GPU; the GPU and the clock are stood in for."""

from types import SimpleNamespace

import pytest
import torch

from csbp.topology import Grid
from pipelines import backend_choice
from pipelines.backend_choice import backend_of
from pipelines.ranks import join_ranks
from tests.pipelines.tiny_run import make_run

GPU = torch.device("cuda")


@pytest.fixture
def measured(monkeypatch):
    asked = []

    def race(names, shape, work, dtype, device):
        asked.append((tuple(names), work, dtype))
        return {"triton": 2e-3, "flash": 1e-3}

    monkeypatch.setattr(backend_choice, "race", race)
    monkeypatch.setattr(
        backend_choice, "choose_backend", lambda asked, *_: ("triton" if asked == "auto" else asked, "")
    )
    monkeypatch.setattr(backend_choice, "compute_dtype", lambda *_: torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    join_ranks()
    return asked


def choose(folder, head: int = 16, **parallel):
    config = make_run(folder, parallel=parallel)
    corpus = SimpleNamespace(longest=300, most_documents=2)
    drafter = SimpleNamespace(head_dim=head, num_drafts=3)
    return backend_of(config, corpus, drafter, Grid.single(), GPU)


def test_the_faster_one_is_taken_and_the_times_are_said(tmp_path, measured, monkeypatch):
    monkeypatch.setattr(backend_choice, "drafter_shape", lambda config: config)
    name, reason = choose(tmp_path)
    assert (name, reason) == ("flash", "attention of a micro-step takes triton 2.00 ms, flash 1.00 ms")
    ((names, work, dtype),) = measured
    assert (names, dtype) == (("triton", "flash"), torch.bfloat16)
    assert work.context == 300


@pytest.mark.parametrize(
    ("parallel", "name"),
    [
        ({"attention_backend": "triton"}, "triton"),
        ({"attention_backend": "torch"}, "torch"),
        ({"deterministic": True}, "triton"),
    ],
)
def test_nothing_is_measured_where_it_was_said_or_has_to_repeat(tmp_path, measured, parallel, name):
    assert choose(tmp_path, **parallel) == (name, "")
    assert measured == []


def test_heads_that_flash_does_not_take(tmp_path, measured):
    name, reason = choose(tmp_path, head=12)
    assert name == "triton"
    assert "heads of a multiple of 8" in reason
    assert measured == []
