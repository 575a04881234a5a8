"""A training run on one rank: what it learns, what it leaves behind, what it refuses."""

from __future__ import annotations

import json

import pytest
import torch

from csbp.memory import PeakTracker
from drafter.checkpoint import ExportError, load_drafter
from drafter.frozen import FrozenHead, embed_blocks
from drafter.objective import ObjectiveConfig
from pipelines.anchors import build_blocks
from pipelines.corpus import DataError
from pipelines.exports import export_checkpoint
from pipelines.figures import Sums, per_slot
from pipelines.logs import read_metrics
from pipelines.optimization import NonFiniteError
from pipelines.run_folder import complete
from pipelines.runfile import RunFileError, load_run
from pipelines.step import DraftStep
from pipelines.train_result import render_train
from pipelines.trainer import Trainer, run_train
from pipelines.training_state import CheckpointError, find_checkpoint, read_weights
from pipelines.validation import validate
from tests.pipelines.tiny_run import make_run, make_store, make_target


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A run that had time to learn the cycle, and its result."""
    folder = tmp_path_factory.mktemp("learned")
    config = make_run(
        folder,
        schedule={"steps": 120},
        validation={"every": 60},
        checkpoint={"every": 40, "keep": 2},
        logging={"every": 10, "tensorboard": True},
    )
    return config, run_train(config)


def lines(config, kind: str) -> list[dict]:
    return [line for line in read_metrics(config.out / "metrics.jsonl") if line["kind"] == kind]


def test_learns_the_cycle_with_the_only_right_alignment(learned):
    config, result = learned
    train = lines(config, "train")
    assert train[0]["loss"] > 10 * train[-1]["loss"]
    assert all(rate > 0.9 for rate in result.validation["acceptance_by_slot"])
    assert result.validation["acceptance_length"] > 3.5  # 4 less what the ends of samples cut off


def test_result_is_a_value_and_a_table(learned):
    config, result = learned
    assert json.loads((config.out / "result.json").read_text()) == result.to_dict()
    assert result.status == "finished"
    assert result.step == result.total_steps == 120
    assert sum(result.breakdown.values()) == pytest.approx(1.0)
    assert render_train(result).row_count >= 6


def test_metrics_lines_hold_figures_of_their_steps(learned):
    config, result = learned
    train = lines(config, "train")
    assert [line["step"] for line in train] == list(range(10, 121, 10))
    names = ("loss", "lr", "grad_norm", "slots_per_second", "coverage", "union_bytes", "memory_bytes")
    for name in names:
        assert all(line[name] >= 0 for line in train), name
    assert all(line["feature_bytes_read"] == line["union_bytes"] > 0 for line in train)
    assert result.feature_bytes_read == sum(line["feature_bytes_read"] for line in train)
    assert [line["step"] for line in lines(config, "validation")] == [60, 120]
    assert list((config.out / "tensorboard").glob("events*"))


def test_run_leaves_its_facts_and_a_run_file_that_says_the_same(learned):
    config, _ = learned
    facts = json.loads((config.out / "facts.json").read_text())
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["data"]["training_samples"] + facts["data"]["held_out_samples"] == 24
    assert len(facts["data"]["fingerprint"]) == 32
    assert load_run(config.out / "run.yaml") == complete(config)


def test_keeps_the_newest_checkpoints(learned):
    config, _ = learned
    names = sorted(path.name for path in (config.out / "checkpoints").iterdir())
    assert names == ["latest", "step-00000080", "step-00000120"]
    assert (config.out / "checkpoints" / "latest").read_text().strip() == "step-00000120"


@pytest.mark.parametrize("link", ["best", "last"])
def test_exports_load_and_carry_no_training_parametrisation(learned, link):
    config, result = learned
    drafter = load_drafter(config.out / "export" / link)
    assert drafter.config.selector_parametrisation == "free"
    assert drafter.config.block_size == 4
    assert result.exports[link] == str(config.out / "export" / link)


def test_finished_run_is_left_alone(learned):
    config, result = learned
    before = {path: path.stat().st_mtime_ns for path in config.out.rglob("*") if path.is_file()}
    again = run_train(config)
    assert again.status == "already finished"
    assert again.step == result.step
    assert {path: path.stat().st_mtime_ns for path in config.out.rglob("*") if path.is_file()} == before


def test_saved_run_file_starts_the_same_run(learned, tmp_path):
    config, _ = learned
    saved = load_run(config.out / "run.yaml", {"out": tmp_path / "again", "schedule.steps": 5})
    fresh = make_run(config.out.parent, out=tmp_path / "fresh", schedule={"steps": 5})
    run_train(saved)
    run_train(fresh)
    assert_same_weights(saved, fresh)


def test_any_checkpoint_exports_without_a_trainer(learned, tmp_path):
    config, _ = learned
    early = load_drafter(export_checkpoint(config.out, "80", tmp_path / "early"))
    last = load_drafter(export_checkpoint(config.out, "last", tmp_path / "last"))
    served = load_drafter(config.out / "export" / "last")
    assert torch.equal(last.fc.weight, served.fc.weight)
    assert not torch.equal(early.fc.weight, last.fc.weight)
    best = load_drafter(export_checkpoint(config.out, "best", tmp_path / "best"))
    assert torch.equal(best.fc.weight, load_drafter(config.out / "export" / "best").fc.weight)
    with pytest.raises(CheckpointError, match="no checkpoint '7'"):
        export_checkpoint(config.out, "7", tmp_path / "none")
    with pytest.raises(CheckpointError, match="exists"):
        export_checkpoint(config.out, "last", tmp_path / "last")


def test_goes_on_from_an_exported_drafter_at_its_loss(learned, tmp_path):
    config, result = learned
    source = {"init_from": config.out / "export" / "last"}
    trainer = Trainer(complete(make_run(config.out.parent, out=tmp_path / "more", drafter=source)))
    at_step_0 = validate(trainer.module, trainer.loader.held_out(None), trainer.grid)
    assert at_step_0["ce"] == pytest.approx(result.validation["ce"], rel=1e-4)
    assert at_step_0["acceptance_by_slot"] == result.validation["acceptance_by_slot"]


def assert_same_weights(one, other, *, exact: bool = True) -> None:
    a, b = (read_weights(find_checkpoint(config.out)) for config in (one, other))
    assert a.keys() == b.keys()
    for name in a:
        if exact:
            assert torch.equal(a[name], b[name]), name
        else:
            torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6, msg=name)


def test_batch_in_one_or_four_pieces_gives_the_same_run(tmp_path):
    whole = make_run(tmp_path, out=tmp_path / "whole", batch={"samples": 4, "micro": 4})
    pieces = make_run(tmp_path, out=tmp_path / "pieces", batch={"samples": 4, "micro": 1})
    run_train(whole)
    run_train(pieces)
    for a, b in zip(lines(whole, "train"), lines(pieces, "train"), strict=True):
        # float32 sums in another order
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["coverage"] == pytest.approx(b["coverage"])
    assert_same_weights(whole, pieces, exact=False)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_stages_give_the_same_run(tmp_path, stage):
    plain = make_run(tmp_path, out=tmp_path / "plain")
    sharded = make_run(tmp_path, out=tmp_path / "sharded", parallel={"zero": stage})
    run_train(plain)
    run_train(sharded)
    assert_same_weights(plain, sharded, exact=False)
    norms = [[line["grad_norm"] for line in lines(config, "train")] for config in (plain, sharded)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize("stage", [0, 1])
def test_non_finite_gradient_stops_the_run_and_saves_nothing(tmp_path, stage):
    make_store(tmp_path / "store", make_target(tmp_path / "target"))
    config = make_run(tmp_path, parallel={"zero": stage}, checkpoint={"every": 1})
    trainer = Trainer(complete(config))
    read = trainer.corpus.rows

    def broken(refs, lengths, ranges):
        rows, count = read(refs, lengths, ranges)
        return (rows * float("nan") if trainer.state.step >= 2 else rows), count

    trainer.corpus.rows = broken
    with pytest.raises(NonFiniteError, match=r"step \d+: gradient norm .* at learning rate"):
        trainer.run()
    last = find_checkpoint(config.out)
    assert all(torch.isfinite(tensor).all() for tensor in read_weights(last).values())


def test_high_learning_rate_keeps_masters_in_float32(tmp_path):
    config = make_run(tmp_path, optimizer={"lr": 0.05}, schedule={"steps": 40})
    run_train(config)
    weights = read_weights(find_checkpoint(config.out))
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def test_other_settings_in_the_same_folder_are_refused(tmp_path):
    run_train(make_run(tmp_path, checkpoint={"stop_at": 2}))
    with pytest.raises(RunFileError, match=r"optimizer\.lr: 0\.003 -> 0\.1"):
        run_train(make_run(tmp_path, optimizer={"lr": 0.1}))


def test_target_of_another_capture_is_refused(tmp_path):
    make_store(tmp_path / "store", make_target(tmp_path / "target"))
    other = make_target(tmp_path / "other", rope_theta=5e5)
    with pytest.raises(DataError, match="fingerprint"):
        run_train(make_run(tmp_path, drafter={"target": str(other)}))


def test_drafter_that_could_not_be_served_is_refused_before_training(tmp_path):
    make_store(tmp_path / "store", make_target(tmp_path / "target", eos_token_id=47))
    with pytest.raises(ExportError, match="47"):
        run_train(make_run(tmp_path))
    assert not (tmp_path / "run").exists()


def test_drafter_with_other_taps_is_refused(learned, tmp_path):
    config, _ = learned
    target = config.out.parent / "target"
    make_store(tmp_path / "store", target, samples=4, target_layer_ids=[0, 2])
    other = make_run(tmp_path, drafter={"init_from": config.out / "export" / "last", "target": str(target)})
    with pytest.raises(DataError, match=r"reads target layers \[1, 3\], the stores hold \[0, 2\]"):
        run_train(other)


def test_run_by_the_clock_ends_with_it(tmp_path):
    config = make_run(
        tmp_path, schedule={"steps": None, "minutes": 0.03}, logging={"every": 1, "tensorboard": False}
    )
    result = run_train(config)
    assert result.total_steps is None
    assert result.status == "finished"
    rates = [line["lr"] for line in lines(config, "train")]
    assert rates[-1] < 0.5 * max(rates)  # the cosine followed the clock
    assert 1.5 < result.seconds < 20


def test_epochs_set_the_number_of_steps(tmp_path):
    config = make_run(tmp_path, schedule={"steps": None, "epochs": 0.5}, data={"validation_fraction": 0.0})
    result = run_train(config)
    assert result.step == result.total_steps == 3  # 24 samples, 4 a step
    assert result.epochs == pytest.approx(0.5)
    assert result.validation == {}


def test_version_1_drafter_trains(tmp_path):
    config = make_run(tmp_path, drafter={"version": 1, "layer_types": ["full_attention"]})
    assert run_train(config).status == "finished"
    assert load_drafter(config.out / "export" / "last").candidate_selector is None


def test_pooled_figures_are_not_means_of_means():
    # four blocks with 3, 2, 1 and 0 accepted drafts, in batches of different make-up: always 6 / 4
    for cut in (((3, 1), (2, 0)), ((3,), (2, 1, 0))):
        sums = Sums()
        for batch in cut:
            sums.add({"run": float(sum(batch)), "blocks": float(len(batch))})
        pooled = sums.take()
        assert float(pooled["run"] / pooled["blocks"]) == 1.5
    assert per_slot(torch.tensor([3.0, 0.0]), torch.tensor([4.0, 0.0])) == [0.75, 0.0]


def test_rank_without_blocks_gives_a_zero_gradient_to_every_parameter(tmp_path):
    trainer = Trainer(complete(make_run(tmp_path)))
    parameters = list(trainer.module.parameters())
    trainer.engine.backward(torch.zeros(()))
    assert all(p.grad is not None and not p.grad.any() for p in parameters)


def test_block_sees_only_what_serving_will_have(tmp_path):
    """Change one feature row: only blocks with an anchor behind it and within the window may move."""
    trainer = Trainer(complete(make_run(tmp_path, drafter={"sliding_window": 6})))
    corpus, step = trainer.corpus, trainer.module
    tokens = corpus.tokens(corpus.train[0])
    anchors = torch.tensor([10, 13, 16, 30])  # 10, 13 and 16 overlap, block size 4
    blocks = build_blocks([tokens], [anchors], 4)
    plan = trainer._plan(blocks.layout)
    rows, _ = corpus.rows([corpus.train[0]], [tokens.length], plan.rows)
    axis = torch.cat([torch.arange(start, stop) for start, stop in plan.rows])
    positions = blocks.layout.positions[:, None] + torch.arange(4)

    @torch.no_grad()
    def hidden(features):
        embeddings = embed_blocks(step.head, trainer.drafter.config, blocks.anchor_ids)
        return trainer.drafter(
            trainer.drafter.fuse(features), plan.row_positions, embeddings, positions, plan.attention()
        )

    before = hidden(rows)
    for row in (9, 10, 12, 13, 15):
        changed = rows.clone()
        changed[axis == row] += 1.0
        moved = (hidden(changed) - before).abs().sum(-1) > 1e-6
        query = anchors[:, None] + torch.arange(4)
        expected = (row < anchors)[:, None] & (query - row < 6)
        assert torch.equal(moved, expected & (axis == row).any()), row


def test_step_memory_does_not_grow_with_unread_context(tmp_path):
    """A window bounds what a step reads, whatever the length of the samples."""
    make_store(tmp_path / "store", make_target(tmp_path / "target"), samples=6, length=400)
    config = make_run(tmp_path, anchors={"per_document": 2}, drafter={"sliding_window": 8})
    batches = Trainer(complete(config)).loader.train(0)
    batch = next(batches)
    batches.close()
    assert batch.tokens >= 800
    assert batch.features.shape[0] <= 4 * 7  # 2 samples, 2 anchors each, 7 rows of history


def test_peak_memory_of_a_windowed_step_does_not_grow_with_the_sequence(tmp_path):
    peaks = []
    for length in (400, 3200):
        folder = tmp_path / str(length)
        make_store(
            folder / "store", make_target(folder / "target", max_position_embeddings=4096), 6, length=length
        )
        config = make_run(folder, anchors={"per_document": 12}, drafter={"sliding_window": 8})
        trainer = Trainer(complete(config))
        batches = trainer.loader.train(0)
        with PeakTracker() as peak:
            sums = trainer.module(next(batches))
            trainer.engine.backward(sums.loss)
        batches.close()
        peaks.append(peak.peak_bytes)
    # 8 times the tokens; the windows of the short samples overlap a little more
    assert peaks[1] < 1.15 * peaks[0]


def test_best_is_the_drafter_with_the_most_accepted_drafts_not_the_last(tmp_path, monkeypatch):
    config = make_run(tmp_path, validation={"every": 2}, schedule={"steps": 6})
    accepted = iter([0.5, 1.5, 1.0])
    figures = {"ce": 0.0, "blocks": 1.0}
    monkeypatch.setattr(
        "pipelines.trainer.validate",
        lambda *_: (
            (value := next(accepted)) and {**figures, "accepted": value, "acceptance_length": 1 + value}
        ),
    )
    result = run_train(config)
    assert (result.best_step, result.best_accepted) == (4, 1.5)
    assert (config.out / "export" / "best").readlink().name == "step-00000004"
    assert (config.out / "export" / "last").readlink().name == "step-00000006"
    assert len(list((config.out / "export").glob("step-*"))) == 2


def test_bf16_keeps_float32_parameters_and_learns(tmp_path):
    config = make_run(tmp_path, precision="bf16", schedule={"steps": 60})
    run_train(config)
    train = lines(config, "train")
    assert train[-1]["loss"] < 0.5 * train[0]["loss"]
    assert {t.dtype for t in read_weights(find_checkpoint(config.out)).values()} == {torch.float32}


def test_objective_reaches_the_step(tmp_path):
    trainer = Trainer(complete(make_run(tmp_path, objective={"weights": "dpace"})))
    assert isinstance(trainer.module, DraftStep)
    assert trainer.module.objective == ObjectiveConfig.model_validate({"weights": "dpace"})
    assert isinstance(trainer.module.head, FrozenHead)
