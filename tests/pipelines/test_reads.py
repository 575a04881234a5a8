"""What a step reads: the union of its windows, however long the sample; and how much waits beside it."""

from __future__ import annotations

import time

import pytest
import torch

from csbp.ownership import visible_rows
from csbp.plan import plan_step
from csbp.rows import RowSet
from csbp.topology import Grid
from csbp.visibility import seen
from drafter.attention import LayerMask
from drafter.config import DrafterConfig
from drafter.objective import ObjectiveConfig
from pipelines.corpus import Corpus, DataConfig, DataError
from pipelines.draw import AnchorConfig
from pipelines.keep import WindowRule
from pipelines.loader import Loader, MicroBatch, Sharding
from pipelines.sampler import BatchConfig
from pipelines.store import FeatureStore
from pipelines.target import target_config
from tests.pipelines.tiny_run import TAPS, embedding_table, make_store, make_target

SLIDING = (LayerMask(window=64, causal=False),) * 3
LONG, ROW = 30_000, len(TAPS) * 32 * 4  # tokens of a sample, bytes of a row


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reads")
    target = make_target(folder / "target", max_position_embeddings=1 << 20)
    make_store(folder / "long", target, samples=2, length=LONG, prompt=10)
    rule = WindowRule(window=64, neighbourhoods=3, neighbourhood_length=100, seed=0)
    make_store(folder / "windows", target, samples=3, length=4000, rule=rule, last_hidden=True)
    make_store(folder / "states", target, samples=6, last_hidden=True)
    return folder


def corpus(folder, name: str, **data) -> Corpus:
    return Corpus(DataConfig.model_validate({"stores": [folder / name], "validation_fraction": 0.0, **data}))


def loader(data: Corpus, rank=0, ranks=1, masks=SLIDING, last_hidden=False, batch=None, **anchors) -> Loader:
    grid = Grid(world=ranks, rank=rank, context_ranks=ranks)
    return Loader(
        data,
        BatchConfig.model_validate(batch or {"samples": 1, "micro": 1}),
        Sharding(0, 1, lambda layout: plan_step(layout, masks, grid)),
        anchors=AnchorConfig.model_validate(anchors),
        block_size=4,
        seed=0,
        last_hidden=last_hidden,
    )


def first(loader: Loader) -> MicroBatch:
    stream = loader.train(0)
    try:
        return next(stream)
    finally:
        stream.close()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("rule", ["uniform", "locality"])
def test_an_all_sliding_step_reads_at_most_1_1_of_its_union(folder, monkeypatch, ranks, rule):
    """Counted where the store is asked, against the windows of the rank's own blocks."""
    asked: list[int] = []
    read = FeatureStore.rows

    def spy(self, index, start, stop):
        asked.append(stop - start)
        return read(self, index, start, stop)

    data = corpus(folder, "long")
    monkeypatch.setattr(FeatureStore, "rows", spy)
    total = 0
    for rank in range(ranks):
        asked.clear()
        batch = first(loader(data, rank, ranks, rule=rule, per_document=64))
        union = len(visible_rows(batch.plan.layout, SLIDING)) * ROW
        own = len(seen(batch.plan.layout, SLIDING[0], batch.plan.own)) * ROW
        assert batch.feature_bytes_read % ROW == 0
        assert sum(asked) * ROW >= batch.feature_bytes_read  # the reader may be one micro-batch further
        assert batch.union_bytes == union
        assert batch.feature_bytes_read <= 1.1 * own
        assert batch.feature_bytes_read < 0.2 * LONG * ROW
        assert max(asked) < 0.1 * LONG
        total += batch.feature_bytes_read
    assert total <= union + (ranks - 1) * 63 * ROW  # each cut between ranks costs a window at most


def test_reads_do_not_grow_with_the_length(folder):
    half = first(loader(corpus(folder, "long", max_length=LONG // 2), rule="locality", per_document=64))
    whole = first(loader(corpus(folder, "long"), rule="locality", per_document=64))
    # eight neighbourhoods of the same size; two of them may touch in one draw
    assert whole.union_bytes < 1.15 * half.union_bytes


def test_positions_of_a_long_sample_stay_whole_numbers(folder):
    batch = first(loader(corpus(folder, "long"), per_document=64))
    assert batch.row_positions.dtype == batch.block_positions.dtype == torch.int64
    assert torch.equal(batch.block_positions[:, 0], batch.plan.layout.anchors[batch.plan.own])


def test_what_waits_is_bounded_by_places_and_not_by_the_consumer(folder, monkeypatch):
    """A slow step: reading stops at `prefetch` micro-batches, and goes on by one for each that is taken."""
    data = corpus(folder, "long", prefetch=2)
    made: list[MicroBatch] = []
    read = Loader._read

    def spy(self, *args, **kwargs):
        made.append(read(self, *args, **kwargs))
        return made[-1]

    monkeypatch.setattr(Loader, "_read", spy)
    stream = loader(data, per_document=64).train(0)
    for taken in range(4):
        deadline = time.monotonic() + 20
        while len(made) < taken + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.15)  # time to run ahead, if it could
        waiting = made[taken:]
        assert len(waiting) == 2
        assert sum(b.waiting_bytes for b in waiting) <= 2 * max(b.waiting_bytes for b in made)
        next(stream)
    stream.close()


def test_only_the_rows_that_a_store_kept_are_asked_for(folder):
    """The store raises for any other, so a whole epoch of every rule passes only if none is."""
    data = corpus(folder, "windows")
    store = FeatureStore.open(folder / "windows")
    assert store.manifest.keep["rule"] == "windows"
    for rule in ("uniform", "locality", "supervised"):
        stream = loader(data, rule=rule, per_document=40, neighbourhoods=2, last_hidden=True).train(0)
        for _ in range(6):
            batch = next(stream)
            spans = store.sample(0).anchor_spans
            assert len(spans) > 1
            assert batch.feature_bytes_read == batch.union_bytes
            assert batch.plan.own.numel() == 40
        stream.close()


def test_a_window_of_one_more_row_is_not_there(folder):
    wider = (LayerMask(window=70, causal=False),)
    with pytest.raises(RuntimeError, match="are stored"):
        first(loader(corpus(folder, "windows"), masks=wider, per_document=200))


def drafter(folder, **changes) -> DrafterConfig:
    settings = {
        "mask_token_id": 47,
        "num_layers": 2,
        "block_size": 4,
        "sliding_window": 64,
        "conv_group_size": 8,
    }
    return DrafterConfig.for_target(
        target_config(folder / "target"), target_layer_ids=TAPS, **{**settings, **changes}
    )


def test_what_a_store_cannot_give_is_refused_before_training(folder):
    labels, states = ObjectiveConfig(), ObjectiveConfig(loss="kl")
    data = corpus(folder, "windows")
    data.check_reach(drafter(folder), "csbp", labels)
    data.check_reach(drafter(folder, sliding_window=40), "replicated", states)
    for config, mode, objective, says in (
        (drafter(folder, sliding_window=65), "csbp", labels, "the drafter's window is 65: lower"),
        (drafter(folder, sliding_window=None), "csbp", labels, "a layer of full attention: slide all layers"),
        (drafter(folder), "cp", labels, "mode cp reads whole samples"),
        (drafter(folder, block_size=80), "csbp", states, "64 labels behind an anchor, a block of 80 has 79"),
    ):
        with pytest.raises(DataError, match=says):
            data.check_reach(config, mode, objective)
    with pytest.raises(DataError, match=r"objective.loss kl .* capture again with --last-hidden"):
        corpus(folder, "long").check_reach(drafter(folder), "csbp", states)
    corpus(folder, "long").check_reach(drafter(folder, sliding_window=None), "cp", labels)


@pytest.mark.parametrize("rank", [0, 1])
def test_states_are_those_from_which_own_labels_were_predicted_each_read_once(folder, rank):
    """Slot j of a block at a: the state at a + j - 1, which here is the head's row of the label."""
    data = corpus(folder, "states")
    batch = first(loader(data, rank, 2, last_hidden=True, batch={"samples": 3, "micro": 3}, per_document=20))
    assert batch.supervised.any()
    states = batch.last_states[batch.state_rows[batch.supervised]]
    assert torch.equal(states, embedding_table()[batch.labels[batch.supervised]])
    wanted = batch.plan.layout.anchors[batch.plan.own, None] + torch.arange(3)
    assert len(batch.last_states) == len(wanted[batch.supervised].unique())
    assert batch.state_bytes_read == batch.last_states.numel() * 4
    alone = first(loader(data, rank, 2, batch={"samples": 3, "micro": 3}, per_document=20))
    assert alone.last_states is None
    assert alone.state_bytes_read == 0


def test_example_rows_are_stored_rows(folder):
    rows = corpus(folder, "windows").example_rows(samples=3, rows=50)
    assert rows.shape == (150, len(TAPS) * 32)
    assert rows.abs().sum(1).min() > 0


def test_ranges_over_the_borders_of_samples_and_chunks(folder, monkeypatch):
    monkeypatch.setattr("pipelines.corpus.READ_CHUNK", 7)
    data = corpus(folder, "states")
    refs = data.train[:3]
    lengths = [ref.tokens for ref in refs]
    axis = torch.cat([data.rows([ref], [ref.tokens], [(0, ref.tokens)])[0] for ref in refs])
    ranges = [(3, 3), (5, lengths[0] + 9), (lengths[0] + 20, lengths[0] + 21), (100, sum(lengths))]
    rows, count = data.rows(refs, lengths, ranges)
    assert torch.equal(rows, axis[RowSet.of(ranges).indices()])
    assert count == len(rows) * ROW
