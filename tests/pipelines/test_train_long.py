"""Runs on mixed lengths, on stores of windows and on the target's own distribution: what they learn, and that
it does not depend on how a step is cut.
"""

from __future__ import annotations

import pytest
import torch

from pipelines.corpus import DataError
from pipelines.keep import WindowRule
from pipelines.logs import read_metrics
from pipelines.runfile import RunConfig
from pipelines.store import Manifest, StoreWriter, TokenSample
from pipelines.train_result import render_train
from pipelines.trainer import run_train
from pipelines.training_state import find_checkpoint, read_state, read_weights
from tests.pipelines.rank_worker import train_all
from tests.pipelines.tiny_run import TAPS, cycle_tokens, make_run, make_store, make_target

LENGTHS = [200, 150, 90, *[40 + i for i in range(6)], *[14 + i % 5 for i in range(18)]]


def mixed_store(folder):
    """Samples of 14 to 200 tokens of the cycle, one talk each."""
    target = make_target(folder / "target")
    make_store(folder / "plain", target, samples=1)
    facts = Manifest.load(folder / "plain")
    generator = torch.Generator().manual_seed(4)
    table = torch.randn(16, len(TAPS) * 32, generator=generator)
    with StoreWriter(folder / "store", facts) as writer:
        for i, length in enumerate(LENGTHS):
            ids = cycle_tokens(length, i)
            sample = TokenSample(f"mixed-{i:02d}", ids, torch.arange(length) >= 4)
            writer.add(sample, table[ids] + 0.1 * torch.randn(length, table.shape[1], generator=generator))


def train_lines(config: RunConfig) -> list[dict]:
    return [line for line in read_metrics(config.out / "metrics.jsonl") if line["kind"] == "train"]


def assert_same_run(one: RunConfig, other: RunConfig) -> None:
    for a, b in zip(train_lines(one), train_lines(other), strict=True):
        # float32 sums in another order
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["coverage"] == pytest.approx(b["coverage"])
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    first, second = (read_weights(find_checkpoint(config.out)) for config in (one, other))
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    mixed_store(folder)
    return folder


def mixed_run(folder, name: str, batch: dict, **sections) -> RunConfig:
    base = {"data": {"validation_fraction": 0.05}, "anchors": {"per_document": 12, "rule": "supervised"}}
    run = make_run(folder, out=folder / name, **{**base, **sections})
    return RunConfig.model_validate({**run.model_dump(), "batch": batch})


@pytest.mark.parametrize("unit", ["tokens", "slots"])
def test_steps_of_equal_size_are_the_same_on_any_ranks(mixed, unit):
    """One rank at once and in pieces, two replicas, two context ranks; some micro-batches are empty."""
    size, micro = {"tokens": (240, 60), "slots": (150, 40)}[unit]
    alone = mixed_run(mixed, f"{unit}-alone", {unit: size})
    run_train(alone)
    others = [
        mixed_run(mixed, f"{unit}-replicas", {unit: size}),
        mixed_run(mixed, f"{unit}-pieces", {unit: size, "micro": micro}, parallel={"zero": 2}),
        mixed_run(mixed, f"{unit}-context", {unit: size, "micro": micro}, parallel={"context_ranks": 2}),
    ]
    results = train_all(others, 2)
    assert [result["status"] for result in results] == ["finished"] * 3, results
    for other in others:
        assert_same_run(alone, other)
    state = read_state(find_checkpoint(alone.out))
    assert 0 < state.samples != 8 * 4  # counted, not assumed


def test_a_stopped_run_of_equal_steps_goes_on_where_it_was(mixed, tmp_path):
    batch = {"tokens": 240, "micro": 100}
    whole = mixed_run(mixed, "whole", batch)
    run_train(whole)
    stopped = whole.model_copy(update={"out": tmp_path / "run"})
    run_train(RunConfig.model_validate({**stopped.model_dump(), "checkpoint": {"stop_at": 5}}))
    assert run_train(stopped).status == "finished"
    first, second = (read_weights(find_checkpoint(config.out)) for config in (whole, stopped))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_epoch_of_equal_steps_takes_every_sample(mixed):
    config = mixed_run(mixed, "epoch", {"tokens": 240}, schedule={"steps": None, "epochs": 2.0})
    result = run_train(config)
    assert result.epochs == pytest.approx(2.0)
    assert result.step == result.total_steps


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    make_store(folder / "store", make_target(folder / "target"), last_hidden=True)
    return folder


@pytest.mark.parametrize("loss", ["kl", "lk", "target_tv"])
def test_learns_the_targets_own_distribution(states, loss):
    """Total variation alone has no gradient where p and q do not meet, so from nothing it starts slowly."""
    config = make_run(
        states,
        out=states / loss,
        schedule={"steps": 100},
        objective={"loss": loss},
        logging={"every": 10, "tensorboard": False},
    )
    result = run_train(config)
    lines = train_lines(config)
    assert lines[-1]["target_ce"] < 0.05  # the states say the token that follows
    assert result.state_bytes_read == sum(line["state_bytes_read"] for line in lines) > 0
    if loss == "target_tv":
        assert lines[-1]["overlap"] > lines[0]["overlap"] + 0.1
        return
    assert lines[-1]["kl"] < 0.2 * lines[0]["kl"]
    assert result.validation["acceptance_length"] > 3.0
    assert loss == "kl" or lines[-1]["overlap"] > 0.7 > lines[0]["overlap"]


def test_two_ranks_learn_the_same_distribution(states):
    sections = {"objective": {"loss": "lk", "weights": "dpace"}}
    alone = make_run(states, out=states / "alone", **sections)
    run_train(alone)
    context = make_run(states, out=states / "context", parallel={"context_ranks": 2}, **sections)
    replicas = make_run(states, out=states / "replicas", batch={"samples": 4, "micro": 1}, **sections)
    results = train_all([context, replicas], 2)
    assert [result["status"] for result in results] == ["finished"] * 2, results
    for other in (context, replicas):
        assert_same_run(alone, other)
        for a, b in zip(train_lines(alone), train_lines(other), strict=True):
            assert a["kl"] == pytest.approx(b["kl"], rel=1e-5)
            assert a["overlap"] == pytest.approx(b["overlap"], rel=1e-5)


def test_a_store_of_windows_gives_the_run_of_the_whole_store(tmp_path):
    """Short answers behind long prompts: all anchors are covered, so draws are the same; a tenth is kept."""
    rule = WindowRule(window=16, neighbourhoods=4, neighbourhood_length=64, seed=0)
    target = make_target(tmp_path / "target")
    common = {"drafter": {"feature_scaling": False, "target": str(target)}}
    runs = []
    for name, kept in (("all", None), ("windows", rule)):
        folder = tmp_path / name
        make_store(folder / "store", target, samples=8, length=300, prompt=280, rule=kept)
        runs.append(make_run(folder, **common))
        run_train(runs[-1])
    first, second = (read_weights(find_checkpoint(config.out)) for config in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)
    sizes = [
        sum(f.stat().st_size for f in (tmp_path / n / "store/features").iterdir()) for n in ("all", "windows")
    ]
    assert sizes[1] < 0.2 * sizes[0]


def test_a_store_that_lacks_rows_is_refused_before_the_run_begins(tmp_path):
    rule = WindowRule(window=16, neighbourhoods=4, neighbourhood_length=64, seed=0)
    make_store(tmp_path / "store", make_target(tmp_path / "target"), rule=rule)
    with pytest.raises(DataError, match="the drafter's window is 32"):
        run_train(make_run(tmp_path, drafter={"sliding_window": 32}))
    assert not (tmp_path / "run").exists()


def test_result_says_what_was_read(tmp_path):
    config = make_run(tmp_path, anchors={"rule": "locality", "neighbourhoods": 2, "per_document": 4})
    result = run_train(config)
    assert (
        result.feature_bytes_read == result.union_bytes == sum(x["union_bytes"] for x in train_lines(config))
    )
    table = render_train(result)
    assert "1.000 x the union of windows" in "".join(str(cell) for cell in table.columns[1].cells)
