"""Training on several gloo ranks: the same run as on one, whatever shares the work, and clear refusals."""

from __future__ import annotations

import json

import pytest
import torch

from pipelines.launch import LaunchError, train_on_ranks
from pipelines.logs import read_metrics
from pipelines.runfile import RunConfig, save_run
from pipelines.trainer import run_train
from pipelines.training_state import find_checkpoint, read_weights
from tests.pipelines.rank_worker import train_all
from tests.pipelines.tiny_run import make_run, make_store, make_target

pytestmark = pytest.mark.ranks
DRAFTER = {"layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
STEPS = 30


def train(config: RunConfig, ranks: int, **overrides):
    """Run `config` on ranks that the command starts."""
    path = config.out.with_suffix(".yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_run(config, path)
    return train_on_ranks(path, overrides, ranks)


def lines(config: RunConfig, kind: str = "train") -> list[dict]:
    return [line for line in read_metrics(config.out / "metrics.jsonl") if line["kind"] == kind]


def facts(config: RunConfig) -> dict:
    return json.loads((config.out / "facts.json").read_text())


def same_lines(one: RunConfig, other: RunConfig) -> None:
    """Every figure that describes the training and not the machine agrees, step by step."""
    pairs = list(zip(lines(one), lines(other), strict=False))
    assert len(pairs) >= 3
    for a, b in pairs:
        # float32, sums in another order; counts are exact
        for name in ("loss", "unary_loss", "selector_loss", "ce"):
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-7), (name, a["step"])
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        for name in ("step", "lr", "epoch", "coverage", "top1", "recall", "selector_top1"):
            assert a[name] == pytest.approx(b[name]), (name, a["step"])


def same_weights(one: RunConfig, other: RunConfig) -> None:
    a, b = (read_weights(find_checkpoint(run.out)) for run in (one, other))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """`STEPS` steps on one rank."""
    config = make_run(tmp_path_factory.mktemp("one"), schedule={"steps": STEPS}, drafter=DRAFTER)
    run_train(config)
    return config


def shared(one_rank: RunConfig, name: str, *, stop_at: int | None = None, micro: int = 2, **parallel):
    """The run of `one_rank` in another folder, with the work shared."""
    return make_run(
        one_rank.out.parent,
        out=one_rank.out.parent / name,
        schedule={"steps": STEPS},
        drafter=DRAFTER,
        batch={"samples": 4, "micro": micro},
        checkpoint={"every": 100, "stop_at": stop_at},
        parallel=parallel,
    )


@pytest.fixture(scope="module")
def two_ranks(one_rank):
    """Runs on the same two ranks, by name: whole ones, and the first steps of others."""
    runs = {
        "context": shared(one_rank, "context", context_ranks=2),
        "context zero 2": shared(one_rank, "context-zero-2", context_ranks=2, zero=2),
        "replicas zero 1": shared(one_rank, "replicas-zero-1", micro=1, zero=1),
        "replicas": shared(one_rank, "replicas", stop_at=6),
        "replicated": shared(one_rank, "replicated", stop_at=6, context_ranks=2, mode="replicated"),
        "cp": shared(one_rank, "cp", stop_at=6, context_ranks=2, mode="cp"),
        "query-sharded": shared(one_rank, "sharded", stop_at=6, context_ranks=2, mode="query-sharded"),
        "as asked": shared(
            one_rank,
            "asked",
            stop_at=6,
            context_ranks=2,
            placement="dealt",
            transport=["gather", "ring"],
            retain=1,
            recompute="all",
        ),
        "three context ranks": shared(one_rank, "three", context_ranks=3),
        "five samples": make_run(one_rank.out.parent, out=one_rank.out.parent / "five", batch={"samples": 5}),
        "transports": shared(one_rank, "transports", context_ranks=2, transport=["ring"]),
        # as when `out` is a folder of each node's own: without a word, one would go on and the other begin
        "apart": [shared(one_rank, f"apart-{rank}", context_ranks=2) for rank in range(2)],
    }
    return runs, dict(zip(runs, train_all(list(runs.values()), 2), strict=True))


@pytest.mark.parametrize("name", ["context", "context zero 2", "replicas zero 1"])
def test_two_ranks_train_the_same_drafter(one_rank, two_ranks, name):
    config, result = two_ranks[0][name], two_ranks[1][name]
    assert result["status"] == "finished", result
    same_lines(one_rank, config)
    same_weights(one_rank, config)
    (ours,), (alone,) = lines(config, "validation"), lines(one_rank, "validation")
    assert ours["blocks"] == alone["blocks"]
    assert ours["accepted"] == pytest.approx(alone["accepted"])
    assert ours["ce"] == pytest.approx(alone["ce"], rel=1e-4)


@pytest.mark.parametrize("name", ["replicas", "replicated", "cp", "query-sharded", "as asked"])
def test_whatever_shares_the_work_the_run_is_the_same(one_rank, two_ranks, name):
    result = two_ranks[1][name]
    assert (result["status"], result["step"]) == ("stopped", 6), result
    same_lines(one_rank, two_ranks[0][name])


def test_lines_say_what_was_sent(one_rank, two_ranks):
    runs = two_ranks[0]
    elements = facts(one_rank)["parameters"]
    summed = 2 * 4 * elements  # bytes of one average over two ranks: each sends half of the buffer twice
    steps = one_rank.logging.every
    assert all(line["gradient_bytes"] == 0 for line in lines(one_rank))
    assert {line["gradient_bytes"] for line in lines(runs["context"])} == {steps * summed}
    # ZeRO 1 sums once a step and gathers weights; ZeRO 2 sums every micro-batch
    assert {line["gradient_bytes"] for line in lines(runs["replicas zero 1"])} == {steps * summed * 1.5}
    assert {line["gradient_bytes"] for line in lines(runs["context zero 2"])} == {steps * summed * 2.5}
    for name in ("context", "as asked", "cp"):
        assert all(
            line["sent_bytes"]["context_kv"] + line["sent_bytes"]["other"] for line in lines(runs[name])
        )
    assert all(line["sent_bytes"]["block_kv"] for line in lines(runs["cp"]))
    for name in ("replicas", "query-sharded"):
        assert not any(sum(line["sent_bytes"].values()) for line in lines(runs[name]))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("three context ranks", r"TopologyError: context_ranks must divide the world of 2 ranks, found 3"),
        ("five samples", r"DataError: batch.samples = 5 must be a multiple"),
        ("transports", r"PlanError: transport must name one way, or one for each of 2 layers, found 1"),
        ("apart", r"RanksError: every rank must see the same out, but rank 0 sees"),
    ],
)
def test_what_does_not_fit_together_is_refused_on_every_rank(two_ranks, name, says):
    assert isinstance(two_ranks[1][name], str)
    assert two_ranks[1][name].startswith(says)


def test_ranks_with_nothing_to_do_are_exact(tmp_path):
    """One block a sample on two context ranks, under every ZeRO stage; at first the selector has no block."""
    sections = {
        "anchors": {"per_document": 1},
        "batch": {"samples": 2, "micro": 1},
        "drafter": DRAFTER,
        "objective": {"selector_start_step": 2},
    }
    alone = make_run(tmp_path, out=tmp_path / "alone", **sections)
    run_train(alone)
    stages = [
        make_run(tmp_path, out=tmp_path / f"{zero}", parallel={"context_ranks": 2, "zero": zero}, **sections)
        for zero in (0, 1, 2)
    ]
    # the same with the choice left to the planner: a run this small fits on one context rank, so two replicas
    chosen = make_run(tmp_path, out=tmp_path / "chosen", parallel={"context_ranks": "auto"}, **sections)
    for result in train_all([*stages, chosen], 2):
        assert result["status"] == "finished", result
    assert facts(chosen)["context_ranks"] == 1
    for run in (*stages, chosen):
        same_weights(alone, run)


def test_four_ranks_and_samples_shorter_than_the_context_ranks(one_rank, tmp_path):
    grid = shared(one_rank, "grid", micro=1, context_ranks=2, zero=2)
    make_store(tmp_path / "store", make_target(tmp_path / "target"), length=3, prompt=1)
    short = {"drafter": DRAFTER, "batch": {"samples": 4, "micro": 1}, "schedule": {"steps": 4}}
    alone = make_run(tmp_path, out=tmp_path / "alone", **short)
    run_train(alone)
    split = make_run(tmp_path, out=tmp_path / "split", parallel={"context_ranks": 4}, **short)
    results = train_all([grid, split], 4)
    assert [result["status"] for result in results] == ["finished", "finished"], results
    same_lines(one_rank, grid)
    same_weights(one_rank, grid)
    same_weights(alone, split)


def test_resume_on_another_number_of_ranks(one_rank, tmp_path):
    config = make_run(one_rank.out.parent, out=tmp_path / "run", schedule={"steps": STEPS}, drafter=DRAFTER)
    stopped = train(config, 2, **{"checkpoint.stop_at": 13, "parallel.zero": 1})
    assert (stopped.status, stopped.step) == ("stopped", 13)
    assert run_train(config).status == "finished"
    same_weights(one_rank, config)


def test_launcher_inside_a_launcher_is_refused(tmp_path, monkeypatch):
    config = make_run(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="leave --nproc-per-node out"):
        train(config, 2)
