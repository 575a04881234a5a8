"""The split, the order, which rows are read, and that reading ahead is bounded and honest."""

from __future__ import annotations

import threading
import time
from typing import ClassVar

import pytest
import torch

from csbp.plan import plan_step
from csbp.topology import Grid
from drafter.attention import LayerMask
from pipelines.corpus import Corpus, DataConfig, DataError, SampleRef, split
from pipelines.draw import AnchorConfig
from pipelines.loader import Loader, Sharding, uploaded
from pipelines.prefetch import Prefetcher
from pipelines.sampler import BatchConfig, epoch_order
from pipelines.store import FeatureStore
from tests.pipelines.tiny_run import make_store, make_target

WINDOW = (LayerMask(window=6, causal=False),)
FULL = (LayerMask(window=None, causal=False),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loader")
    make_store(folder / "store", make_target(folder / "target"), samples=20)
    make_store(folder / "packed", folder / "target", samples=4, documents=3)
    return folder


def corpus(folder, *names: str, **data) -> Corpus:
    stores = [folder / name for name in names or ("store",)]
    return Corpus(DataConfig.model_validate({"stores": stores, "validation_fraction": 0.2, **data}))


def loader(data: Corpus, samples=4, micro=2, replica=0, replicas=1, masks=WINDOW, per_document=5) -> Loader:
    grid = Grid.single()
    return Loader(
        data,
        BatchConfig(samples=samples, micro=micro),
        Sharding(replica, replicas, lambda layout: plan_step(layout, masks, grid)),
        anchors=AnchorConfig(per_document=per_document),
        block_size=4,
        seed=0,
    )


def take(stream, count: int) -> list:
    batches = [next(stream) for _ in range(count)]
    stream.close()
    return batches


def test_split_goes_by_conversation_and_stays_when_data_grow():
    small = {SampleRef(0, i, f"s{i}"): f"talk-{i // 3}" for i in range(60)}
    large = {SampleRef(0, i, f"s{i}"): f"talk-{i // 3}" for i in range(600)}
    train, held_out = split(small, 0.3)
    assert {small[r] for r in train}.isdisjoint({small[r] for r in held_out})
    grown_train, grown_held_out = split(large, 0.3)
    assert set(held_out) <= set(grown_held_out)
    assert set(train) <= set(grown_train)
    # 200 conversations at 0.3: standard error 0.032, four of them
    assert abs(len(grown_held_out) / 600 - 0.3) < 0.13


def test_split_holds_out_at_least_one_conversation():
    refs = {SampleRef(0, i, f"s{i}"): f"talk-{i}" for i in range(5)}
    assert len(split(refs, 1e-9)[1]) == 1
    assert split(refs, 0.0)[1] == []


def test_order_is_a_permutation_of_its_names_alone(folder):
    refs = corpus(folder).train
    first = epoch_order(refs, 0, 0)
    assert sorted(first, key=lambda r: r.index) == sorted(refs, key=lambda r: r.index)
    assert first == epoch_order(list(reversed(refs)), 0, 0)
    assert first != epoch_order(refs, 0, 1)
    assert first != epoch_order(refs, 1, 0)


@pytest.mark.parametrize(("micro", "replicas"), [(4, 1), (1, 1), (2, 2), (1, 4)])
def test_data_of_a_step_do_not_depend_on_micro_batches_and_replicas(folder, micro, replicas):
    data = corpus(folder)
    reference = take(loader(data, micro=4).train(3), 2)
    found = [
        batch
        for replica in range(replicas)
        for batch in take(
            loader(data, micro=micro, replica=replica, replicas=replicas).train(3), 8 // micro // replicas
        )
    ]
    for step in (3, 4):
        expected = next(batch for batch in reference if batch.step == step)
        mine = [batch for batch in found if batch.step == step]
        assert sorted(torch.cat([b.labels for b in mine]).tolist()) == sorted(expected.labels.tolist())
        assert sum(b.step_slots for b in mine if b.last) == expected.step_slots


def test_step_slots_are_known_with_its_first_micro_batch(folder):
    batches = take(loader(corpus(folder), samples=6, micro=2).train(0), 3)
    assert len({batch.step_slots for batch in batches}) == 1
    assert batches[0].step_slots == sum(int(batch.supervised.sum()) for batch in batches)


def test_only_rows_that_some_block_sees_are_read(folder):
    batch = take(loader(corpus(folder), per_document=1, micro=1).train(0), 1)[0]
    assert batch.features.shape[0] == 5  # window 6 counts the query: 5 rows of history before the anchor
    assert batch.feature_bytes_read == batch.union_bytes == 5 * 64 * 4
    everything = take(loader(corpus(folder), per_document=1, micro=1, masks=FULL).train(0), 1)[0]
    assert everything.features.shape[0] == int(everything.block_positions[0, 0])


def test_rows_and_positions_are_those_of_the_samples(folder):
    data = corpus(folder, "packed", validation_fraction=0.0)
    batch = take(loader(data, samples=2, micro=2).train(0), 1)[0]
    store = FeatureStore.open(folder / "packed")
    refs = epoch_order(data.train, 0, 0)[:2]
    axis = torch.cat([store.rows(ref.index, 0, len(store.sample(ref.index).token_ids)) for ref in refs])
    at = torch.cat([torch.arange(start, stop) for start, stop in batch.plan.rows])
    assert torch.equal(batch.features, axis[at])
    starts, offset = [], 0
    for ref in refs:
        sample = store.sample(ref.index)
        starts += (sample.document_starts + offset).tolist()
        offset += len(sample.token_ids)
    starts = torch.tensor(starts)
    assert torch.equal(batch.row_positions, at - starts[torch.searchsorted(starts, at, right=True) - 1])
    assert batch.documents == 6


def test_held_out_anchors_are_the_same_every_time(folder):
    data = corpus(folder)
    one, two = (list(loader(data).held_out(None)) for _ in range(2))
    assert len(one) == -(-len(data.held_out) // 2)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.anchor_ids, b.anchor_ids)
        assert torch.equal(a.features, b.features)
    assert len(list(loader(data).held_out(1))) == 1


def test_replicas_see_equally_many_held_out_batches_and_each_sample_once(folder):
    data = corpus(folder)
    replicas = [list(loader(data, replica=r, replicas=3, samples=6).held_out(None)) for r in range(3)]
    assert len({len(batches) for batches in replicas}) == 1
    together = [ids for batches in replicas for batch in batches for ids in batch.labels.tolist()]
    alone = [ids for batch in loader(data).held_out(None) for ids in batch.labels.tolist()]
    assert sorted(together) == sorted(alone)


def test_store_without_supervision_is_refused(tmp_path):
    store = make_store(tmp_path / "store", make_target(tmp_path / "target"), samples=3, prompt=1000)
    with pytest.raises(DataError, match="0 supervised tokens in the 3 samples"):
        Corpus(DataConfig(stores=[store]))


def test_samples_without_anchors_are_left_out(folder, tmp_path):
    make_store(tmp_path / "empty", folder / "target", samples=2, prompt=1000)
    config = DataConfig(stores=[folder / "store", tmp_path / "empty"])
    assert Corpus(config).unusable == 2


def test_stores_of_two_targets_are_refused(folder, tmp_path):
    other = make_store(tmp_path / "other", make_target(tmp_path / "target", rope_theta=1e6), samples=2)
    with pytest.raises(DataError, match="one target: target_fingerprint"):
        Corpus(DataConfig(stores=[folder / "store", other]))


def test_fingerprint_depends_on_samples_not_on_the_order_of_stores(folder, tmp_path):
    one, two = corpus(folder, "store", "packed"), corpus(folder, "packed", "store")
    assert one.fingerprint == two.fingerprint
    assert one.fingerprint != corpus(folder).fingerprint


def test_frequent_tokens_come_first(folder):
    data = corpus(folder)
    store = FeatureStore.open(folder / "store")
    samples = [store.sample(index) for index in range(len(store))]
    counts = torch.cat([s.token_ids[s.loss_mask] for s in samples]).bincount()
    assert (counts[data.frequent_ids].diff() <= 0).all()


def test_long_samples_are_cut(folder):
    batch = take(loader(corpus(folder, max_length=20), per_document=100, micro=1, masks=FULL).train(0), 1)[0]
    assert batch.tokens == 20
    assert int(batch.block_positions[:, 0].max()) == 18


def test_reading_ahead_is_bounded():
    made = []

    def source():
        for i in range(100):
            made.append(i)
            yield i

    stream = Prefetcher(source(), depth=2)
    time.sleep(0.3)
    assert made == [0, 1]  # both wait: nothing is begun without a place
    assert next(stream) == 0
    time.sleep(0.2)
    assert made == [0, 1, 2]
    stream.close()
    assert not any(thread.name == "feature-reader" for thread in threading.enumerate())


def test_reader_error_reaches_the_step():
    def source():
        raise OSError("disk gone")
        yield

    stream = Prefetcher(source(), depth=2)
    with pytest.raises(OSError, match="disk gone"):
        next(stream)
    stream.close()


class Stream:
    """A stream of a GPU that is not there: what was begun on it, and whether that was waited for."""

    current: ClassVar[list] = []

    def __init__(self, device):
        self.begun, self.waited = [], 0
        Stream.made = self

    def __enter__(self):
        Stream.current.append(self)

    def __exit__(self, *_):
        Stream.current.pop()

    def synchronize(self):
        self.waited = len(self.begun)


class Batch:
    def __init__(self, number):
        self.number, self.on = number, None

    def to(self, device):
        self.on = Stream.current[-1]
        self.on.begun.append(self.number)


def test_the_next_batch_is_copied_on_a_stream_of_its_own_and_waited_for_by_the_thread(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    read = Prefetcher((Batch(number) for number in range(9)), depth=2)
    ahead = Prefetcher(uploaded(read, torch.device("cpu")), depth=1)
    for number in range(3):
        batch = next(ahead)
        assert batch.number == number
        assert batch.on is Stream.made
        assert Stream.made.waited > number
    time.sleep(0.2)
    assert Stream.made.begun == [0, 1, 2, 3]  # one ahead, however long the step takes
    ahead.close()
    assert not read._thread.is_alive()


def test_a_batch_is_the_same_whether_it_was_copied_ahead_or_not(folder):
    there = torch.device("cpu")
    batches = zip(
        take(loader(corpus(folder)).train(0), 3), take(loader(corpus(folder)).train(0), 3), strict=True
    )
    for one, other in batches:
        taken = one.taken(there)
        assert torch.equal(taken.features, other.to(there).features)
