"""How anchors are drawn: determinism, budgets, and that the marginals are what each rule says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csbp.layout import BlockLayout
from csbp.ownership import visible_rows
from drafter.attention import LayerMask
from pipelines.anchors import Tokens, legal_anchors
from pipelines.draw import AnchorConfig, _Words, draw_anchors
from pipelines.rejected import ListError, read_rejected, write_rejected
from tests.pipelines.test_anchors import tokens

RULES = ("uniform", "locality", "supervised")


def config(per_document: int, rule: str = "uniform", **more) -> AnchorConfig:
    return AnchorConfig.model_validate({"rule": rule, "per_document": per_document, **more})


def draw(sample: Tokens, chosen: AnchorConfig, epoch: int | str = 0, seed: int = 0) -> torch.Tensor:
    return draw_anchors(sample, chosen, 4, seed, epoch)


@pytest.mark.parametrize("rule", RULES)
def test_draw_depends_on_its_names_alone(rule):
    sample, chosen = tokens("0" + "1" * 300), config(16, rule)
    first = draw_anchors(sample, chosen, 4, seed=1, epoch=0)
    torch.manual_seed(123)  # process state must not matter
    assert torch.equal(first, draw_anchors(sample, chosen, 4, seed=1, epoch=0))
    assert not torch.equal(first, draw_anchors(sample, chosen, 4, seed=2, epoch=0))
    assert not torch.equal(first, draw_anchors(sample, chosen, 4, seed=1, epoch=1))
    other = Tokens("another", sample.token_ids, sample.loss_mask, sample.document_starts)
    assert not torch.equal(first, draw_anchors(other, chosen, 4, seed=1, epoch=0))


@pytest.mark.parametrize("rule", ["uniform", "locality"])
@pytest.mark.parametrize(
    ("legal", "taken", "groups", "length"), [(40, 10, 4, None), (40, 10, 3, 6), (9, 7, 4, 2)]
)
def test_every_legal_anchor_is_equally_likely(rule, legal, taken, groups, length):
    """Also those at the ends of the document, which a neighbourhood cut off at the edges would miss."""
    epochs = 800
    sample = tokens("0" + "1" * (legal + 1))
    chosen = config(taken, rule, neighbourhoods=groups, neighbourhood_length=length)
    counts = torch.zeros(legal + 2, dtype=torch.float64)
    for epoch in range(epochs):
        counts[draw(sample, chosen, epoch)] += 1
    counts, share = counts[1 : legal + 1], taken / legal
    # five standard errors for the worst of `legal` anchors
    assert (counts / epochs - share).abs().max() < 5 * (share * (1 - share) / epochs) ** 0.5


@pytest.mark.parametrize(
    ("legal", "taken", "groups", "length"), [(40, 10, 4, None), (11, 9, 4, 2), (30, 1, 8, 2)]
)
def test_a_pattern_of_neighbourhoods_turned_all_the_way_round_takes_every_anchor_equally_often(
    monkeypatch, legal, taken, groups, length
):
    """Exact: the pattern of one draw, at each of the equally likely turns of the circle."""
    sample = tokens("0" + "1" * (legal + 1))
    chosen = config(taken, "locality", neighbourhoods=groups, neighbourhood_length=length)
    below, counts = _Words.below, torch.zeros(legal + 2)
    for turn in range(legal):
        monkeypatch.setattr(
            _Words,
            "below",
            lambda self, limit, count, t=turn: np.array([t]) if limit == legal else below(self, limit, count),
        )
        counts[draw(sample, chosen)] += 1
    assert (counts[1 : legal + 1] == taken).all()


def test_neighbourhoods_cut_off_at_the_ends_would_be_noticed():
    """The test above fails for the plain rule: a start anywhere, picks behind it, nothing behind the end."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(40)
    for _ in range(800):
        start = int(torch.randint(37, (), generator=generator))
        counts[start + torch.randperm(4, generator=generator)[:2]] += 1
    share = 2 / 40
    assert (counts / 800 - share).abs().max() > 5 * (share * (1 - share) / 800) ** 0.5


def test_neighbourhoods_keep_a_step_within_a_few_windows():
    """512 anchors in 8 neighbourhoods of a million tokens: 8 windows and spans, not 16 times as much."""
    sample, window = tokens("0" + "1" * (1 << 20)), 2048
    unions = {}
    for rule in ("uniform", "locality"):
        anchors = draw_anchors(sample, config(512, rule), 8, 0, 0)
        layout = BlockLayout(anchors, torch.zeros_like(anchors), sample.length, 8)
        unions[rule] = len(visible_rows(layout, [LayerMask(window, causal=False)]))
    span = 8 * 64  # of a neighbourhood: its 64 anchors a block apart on average
    assert (
        unions["locality"] <= 8 * (span + window - 1) + window
    )  # one may be cut in two by the document's end
    assert unions["locality"] > 8 * window * 0.9  # several neighbourhoods, not one
    assert unions["uniform"] > 16 * unions["locality"]


def test_neighbourhoods_do_not_overlap_and_share_equally():
    sample = tokens("0" + "1" * 1000)
    for epoch in range(50):
        drawn = draw(sample, config(40, "locality", neighbourhoods=4, neighbourhood_length=15), epoch)
        # on the circle of 999 legal anchors, four gaps part groups of ten that span at most 15
        gaps = torch.cat([drawn.diff(), drawn[:1] + 999 - drawn[-1:]])
        breaks = (gaps > 15).nonzero().flatten()
        if len(breaks) == 4:  # two may stand so near that no gap shows
            assert torch.cat([breaks.diff(), breaks[:1] + 40 - breaks[-1:]]).tolist() == [10] * 4
        assert len(drawn.unique()) == 40


def test_short_answers_are_not_outnumbered():
    """Answers of 3, 200 and 40 legal anchors and a budget of 24: 3, and the rest in equal numbers."""
    sample = tokens("00" + "1" * 4 + "000" + "1" * 201 + "0" + "1" * 41)
    edges = torch.tensor([6, 210])
    rest = torch.zeros(3)
    for epoch in range(200):
        taken = torch.bucketize(draw(sample, config(24, "supervised"), epoch), edges, right=True).bincount()
        assert taken.sum() == 24
        assert taken[0] == 3
        assert {int(taken[1]), int(taken[2])} == {10, 11}
        rest += taken == 11
    assert abs(rest[1] / 200 - 0.5) < 5 * 0.5 / 200**0.5  # the odd one goes to either


def test_within_an_answer_every_anchor_is_equally_likely():
    sample = tokens("00" + "1" * 5 + "000" + "1" * 41)
    counts = torch.zeros(sample.length)
    for epoch in range(600):
        counts[draw(sample, config(14, "supervised"), epoch)] += 1
    assert (counts[2:6] == 600).all()
    share = 10 / 40
    assert (counts[10:50] / 600 - share).abs().max() < 5 * (share * (1 - share) / 600) ** 0.5


def test_more_answers_than_anchors_share_by_lot():
    sample = tokens("0" + "110" * 60)
    counts = torch.zeros(sample.length)
    for epoch in range(600):
        drawn = draw(sample, config(20, "supervised"), epoch)
        assert len(drawn) == 20
        counts[drawn] += 1
    share = 20 / 60
    assert (counts[1::3] / 600 - share).abs().max() < 5 * (share * (1 - share) / 600) ** 0.5


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_drawn_anchors_are_legal_ascending_and_within_budget(data):
    mask = data.draw(st.text("01", min_size=2, max_size=80))
    cuts = data.draw(st.sets(st.integers(1, len(mask) - 1), max_size=4))
    sample = tokens(mask, (0, *sorted(cuts)))
    if data.draw(st.booleans()):
        edges = sorted(data.draw(st.sets(st.integers(0, len(mask)), max_size=6)))
        spans = torch.tensor(edges[: len(edges) // 2 * 2], dtype=torch.int64).view(-1, 2)
        sample = Tokens("kept", sample.token_ids, sample.loss_mask, sample.document_starts, spans)
    chosen = config(
        data.draw(st.integers(1, 8)),
        data.draw(st.sampled_from(RULES)),
        neighbourhoods=data.draw(st.integers(1, 10)),
        neighbourhood_length=data.draw(st.none() | st.integers(1, 40)),
    )
    drawn = draw_anchors(sample, chosen, data.draw(st.integers(2, 16)), 3, 5)
    legal = legal_anchors(sample)
    assert torch.isin(drawn, legal).all()
    assert (drawn.diff() > 0).all()
    bucket = [torch.bucketize(x, sample.document_starts, right=True) - 1 for x in (drawn, legal)]
    counts = [x.bincount(minlength=len(sample.document_starts)) for x in bucket]
    assert torch.equal(counts[0], counts[1].clamp(max=chosen.per_document))


def rejected(per_document: int, **more) -> AnchorConfig:
    return config(per_document, "rejected", rejected="list.jsonl", **more)


@pytest.mark.parametrize(
    ("named", "share", "wanted"), [(20, 0.75, 6), (4, 0.75, 4), (20, 1.0, 8), (38, 0.5, 6)]
)
def test_most_anchors_are_those_of_rejected_drafts(named, share, wanted):
    """As many as the share asks for, fewer if there are no more, more if the rest has too few."""
    sample = tokens("0" + "1" * 41)  # 40 legal anchors, from the second token on
    listed = np.arange(1, 1 + named)
    found = draw_anchors(sample, rejected(8, rejected_share=share), 4, 0, 0, listed)
    assert len(found) == 8 == len(found.unique())
    assert int(np.isin(found.numpy(), listed).sum()) == wanted
    again = draw_anchors(sample, rejected(8, rejected_share=share), 4, 0, 1, listed)
    assert not torch.equal(found, again)


def test_a_sample_without_a_list_is_drawn_anywhere_and_a_short_one_whole():
    sample = tokens("0" + "1" * 41)
    assert len(draw_anchors(sample, rejected(8), 4, 0, 0)) == 8
    assert len(draw_anchors(sample, rejected(64), 4, 0, 0, np.array([3]))) == 40


def test_lists_are_read_as_written_and_others_are_refused(tmp_path):
    file = tmp_path / "list.jsonl"
    write_rejected(file, {"a": [3, 9], "b": []})
    found = read_rejected(file)
    assert {name: anchors.tolist() for name, anchors in found.items()} == {"a": [3, 9], "b": []}
    file.write_text('{"id": "a"}\n')
    for path in (file, tmp_path / "none"):
        with pytest.raises(ListError, match="replay --store STORE --drafter DRAFTER --rejected FILE"):
            read_rejected(path)


def test_rule_and_list_go_together():
    for more in ({"rule": "rejected"}, {"rule": "uniform", "rejected": "x"}):
        with pytest.raises(ValueError, match="needs the file"):
            AnchorConfig.model_validate({"per_document": 4, **more})
