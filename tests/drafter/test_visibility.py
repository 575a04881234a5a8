"""What every block row sees, by changing one input row and listing the outputs that move."""

import pytest
import torch

from drafter.attention import LayerMask
from drafter.cache import DraftCache, draft_hidden
from drafter.config import DrafterConfig
from drafter.dense import DenseAttention
from drafter.frozen import FrozenHead, embed_blocks
from drafter.proposal import propose
from tests.drafter.tiny import MIXED, dense_hidden, tiny_config, tiny_drafter, tiny_head

BLOCK = 8
LENGTH = 40
LAYER_TYPES = {
    "full": {"sliding_window": None},
    "sliding": {"sliding_window": 4},
    "causal sliding": {"sliding_window": 4, "is_causal": None},
    "mixed": {"sliding_window": 4, "layer_types": MIXED, "is_causal": None},
}


def inputs(drafter, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(LENGTH, drafter.config.feature_width, generator=generator)
    return features, torch.randint(4, 97, (LENGTH,), generator=generator)


@torch.no_grad()
def moved(drafter, anchors, changed_row, starts=None):
    """Slots (block, row) whose output changes with the feature of one context row."""
    head = tiny_head()
    features, ids = inputs(drafter)
    before = dense_hidden(drafter, head, features, anchors, ids, starts)
    features[changed_row] += 1.0
    after = dense_hidden(drafter, head, features, anchors, ids, starts)
    return {tuple(place) for place in ((before != after).any(-1)).nonzero().tolist()}


def visible_rows(drafter, anchor, slot, starts=None):
    return {
        row
        for row in range(LENGTH)
        if any(place == (0, slot) for place in moved(drafter, [anchor], row, starts))
    }


@pytest.mark.parametrize("kind", LAYER_TYPES)
@pytest.mark.parametrize("version", [1, 2])
def test_blocks_never_see_their_anchor_or_anything_after_it(kind, version):
    """C1: two anchors three apart; a block is blind to the features from its anchor on."""
    drafter = tiny_drafter(tiny_config(version, block_size=BLOCK, **LAYER_TYPES[kind]))
    for row in (20, 21, 22, 23, 27, 30):
        blocks = {block for block, _ in moved(drafter, [20, 23], row)}
        assert 0 not in blocks
        assert row < 23 or 1 not in blocks
    # row 19 is four behind anchor 23, out of a window of four
    within_window = {0, 1} if kind in ("full", "mixed") else {0}
    assert {block for block, _ in moved(drafter, [20, 23], 19)} == within_window


@pytest.mark.parametrize("kind", LAYER_TYPES)
def test_blocks_do_not_see_each_other(kind):
    drafter, head = tiny_drafter(tiny_config(block_size=BLOCK, **LAYER_TYPES[kind])), tiny_head()
    features, ids = inputs(drafter)
    with torch.no_grad():
        both = dense_hidden(drafter, head, features, [20, 23], ids)
        for index, anchor in enumerate((20, 23)):
            alone = dense_hidden(drafter, head, features, [anchor], ids)
            torch.testing.assert_close(both[index], alone[0])


@pytest.mark.parametrize("kind", LAYER_TYPES)
def test_blocks_do_not_see_the_document_before_theirs(kind):
    """C2: two documents on one axis; nothing of the first reaches a block of the second."""
    drafter = tiny_drafter(tiny_config(block_size=BLOCK, **LAYER_TYPES[kind]))
    assert moved(drafter, [21], 19, starts=[20]) == set()
    assert moved(drafter, [21], 20, starts=[20]) != set()


def test_window_is_measured_from_each_query():
    """C11: DFlash, one causal layer, W = 4: slot j of anchor 20 sees context from 20 + j - 3 up to 19."""
    config = tiny_config(1, num_layers=1, block_size=BLOCK, sliding_window=4, is_causal=True)
    drafter = tiny_drafter(config)
    for slot in range(BLOCK):
        assert visible_rows(drafter, 20, slot) == set(range(20 + slot - 3, 20))


def test_symmetric_window_binds_inside_the_block():
    """One non-causal layer, W = 4: slot 0 does not move with slot 4's embedding, slot 1 does."""
    config = tiny_config(1, num_layers=1, block_size=BLOCK, sliding_window=4, is_causal=False)
    drafter, head = tiny_drafter(config), tiny_head()
    attention_masks = config.layer_masks
    assert attention_masks == (LayerMask(4, causal=False),)
    features, ids = inputs(drafter)
    anchors = torch.tensor([20])
    attention = DenseAttention(anchors, torch.zeros(1, dtype=torch.int64), LENGTH, BLOCK, attention_masks)
    blocks = embed_blocks(head, config, ids[anchors])

    def run(embeddings):
        with torch.no_grad():
            return drafter(
                drafter.fuse(features),
                torch.arange(LENGTH),
                embeddings,
                torch.arange(20, 28)[None],
                attention,
            )

    changed = blocks.clone()
    changed[0, 4] += 1.0
    assert [slot for slot in range(BLOCK) if (run(blocks) != run(changed))[0, slot].any()] == list(
        range(1, 8)
    )


def test_full_layers_see_the_whole_document():
    drafter = tiny_drafter(tiny_config(1, num_layers=1, block_size=BLOCK, sliding_window=None))
    for slot in (0, BLOCK - 1):
        assert visible_rows(drafter, 20, slot) == set(range(20))


def test_causality_of_each_layer_follows_the_released_rules():
    """`is_causal`, else `dflash_config.causal`, else exactly the sliding layers are causal."""
    released = tiny_config(layer_types=MIXED, is_causal=None).to_dict()

    def causal(**changes):
        return [mask.causal for mask in DrafterConfig.from_dict({**released, **changes}).layer_masks]

    assert causal() == [True, False]
    assert causal(is_causal=False) == [False, False]
    assert causal(is_causal=True) == [True, True]
    nested = {**released["dflash_config"], "causal": True}
    assert causal(dflash_config=nested) == [True, True]
    assert causal(dflash_config=nested, is_causal=False) == [False, False]


def test_use_swa_and_its_window_are_read():
    released = tiny_config(sliding_window=None).to_dict()
    del released["layer_types"]
    nested = {**released["dflash_config"], "use_swa": True, "swa_window_size": 12}
    masks = DrafterConfig.from_dict(
        {**released, "dflash_config": nested, "use_sliding_window": None}
    ).layer_masks
    assert [mask.window for mask in masks] == [12, 12]


@pytest.mark.parametrize("kind", LAYER_TYPES)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("chunks", [[30], [1] * 30, [13, 2, 5, 1, 9], [2, 0, 28]])
def test_cached_decoding_equals_dense_attention(kind, version, chunks):
    """C9: the window that training masks is the window that decoding keeps, however the context arrives.

    Both run in float64, where orders of summation differ by less than 1e-10.
    """
    config = tiny_config(version, block_size=BLOCK, **LAYER_TYPES[kind])
    drafter, head = tiny_drafter(config, dtype=torch.float64), tiny_head(dtype=torch.float64)
    features, ids = inputs(drafter)
    features = features.double()
    cache = DraftCache(drafter.config)
    start = 0
    for chunk in chunks:
        stop = start + chunk
        hidden = draft_hidden(drafter, cache, features[start:stop], ids[stop : stop + 1], head)
        with torch.no_grad():
            expected = dense_hidden(drafter, head, features, [stop], ids)
        torch.testing.assert_close(hidden, expected, rtol=1e-10, atol=1e-10)
        start = stop
    assert cache.length == 30
    for layer, mask in enumerate(drafter.config.layer_masks):
        assert cache.kept_rows(layer) == (30 if mask.window is None else mask.window - 1)


@pytest.mark.parametrize("version", [1, 2])
def test_bfloat16_decoding_stays_near_float32(version):
    """Eight bits of mantissa through two layers: relative error of the hidden states below 5 %."""
    config = tiny_config(version, block_size=BLOCK)
    drafter, head = tiny_drafter(config, scale=0.1), tiny_head()
    features, ids = inputs(drafter)
    expected = draft_hidden(drafter, DraftCache(config), features, ids[:1], head)
    half, table = drafter.to(torch.bfloat16), head.to(dtype=torch.bfloat16)
    found = draft_hidden(half, DraftCache(config), features.bfloat16(), ids[:1], table)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() < 0.05 * expected.norm()
    assert propose(half, found, ids[:1], table).ids.shape == (1, BLOCK - 1)


def test_cache_of_a_sliding_layer_stays_bounded():
    drafter, head = tiny_drafter(tiny_config(sliding_window=4)), tiny_head()
    cache = DraftCache(drafter.config)
    features, ids = inputs(drafter)
    for step in range(400):
        draft_hidden(drafter, cache, features[step % LENGTH][None], ids[:1], head)
    assert cache.length == 400
    assert cache._layers[0].k_GCE.shape[1] <= 512


def test_shorter_blocks_can_be_drafted():
    drafter, head = (
        tiny_drafter(tiny_config(1, block_size=BLOCK, sliding_window=None, is_causal=True)),
        tiny_head(),
    )
    features, ids = inputs(drafter)
    long = draft_hidden(drafter, DraftCache(drafter.config), features, ids[:1], head)
    short = draft_hidden(drafter, DraftCache(drafter.config), features, ids[:1], head, block_size=3)
    assert short.shape[1] == 3
    torch.testing.assert_close(short, long[:, :3], rtol=1e-5, atol=1e-5)


def test_zeroed_selector_changes_the_drafts():
    """D11: a runtime that ignores the selector would not notice."""
    drafter, head = tiny_drafter(tiny_config(block_size=BLOCK, selector_top_k=16), scale=1.0), tiny_head()
    features, ids = inputs(drafter)
    with torch.no_grad():
        hidden = dense_hidden(drafter, head, features, [20], ids)
    with_selector = propose(drafter, hidden, ids[20:21], head)
    with torch.no_grad():
        drafter.candidate_selector.successor_codebook.zero_()
    without = propose(drafter, hidden, ids[20:21], head)
    assert not torch.equal(with_selector.ids, without.ids)
    assert torch.equal(without.ids, without.candidates[..., 0])


@pytest.mark.parametrize("version", [1, 2])
def test_sampled_drafts_follow_the_reported_probabilities(version):
    """F6: 4000 draws of the first slot; chi-square of 96 or 4 degrees of freedom below its 1e-6 quantile."""
    drafter, head = tiny_drafter(tiny_config(version), scale=0.1), tiny_head()
    head = FrozenHead(head.embedding, head.head * 0.05)
    hidden = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0)).expand(4000, -1, -1)
    drawn = propose(
        drafter,
        hidden,
        torch.full((4000,), 5),
        head,
        temperature=0.7,
        generator=torch.Generator().manual_seed(1),
    )
    q = drawn.probabilities[0, 0].double()
    tokens = drawn.candidates[0, 0] if version == 2 else torch.arange(97)
    counts = (drawn.ids[:, 0, None] == tokens).sum(0)
    chi_square = float(((counts - 4000 * q).square() / (4000 * q)).sum())
    assert counts.sum() == 4000
    assert chi_square < (196.0 if version == 1 else 33.0)
