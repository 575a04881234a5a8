"""Which rows a capture keeps, against what blocks of a drafter see."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from csbp.layout import BlockLayout
from csbp.rows import RowSet
from csbp.visibility import seen
from drafter.attention import LayerMask
from pipelines.keep import WindowRule, choose_rows, rows_to_make
from pipelines.rowformat import FEATURES, LAST


def mask_of(length: int, *supervised: tuple[int, int]) -> Tensor:
    mask = torch.zeros(length, dtype=torch.bool)
    for start, stop in supervised:
        mask[start:stop] = True
    return mask


def legal(mask: Tensor) -> list[int]:
    return [at for at in range(1, len(mask) - 1) if mask[at] and mask[at + 1]]


def seen_by(anchors: list[int], mask: Tensor, window: int) -> set[int]:
    """The rows that attention reads for blocks at `anchors`."""
    at = torch.tensor(anchors, dtype=torch.int64)
    layout = BlockLayout(at, torch.zeros_like(at), len(mask), block_size=4)
    return set(seen(layout, LayerMask(window=window, causal=False)).indices().tolist())


def rows_in(rows: RowSet) -> set[int]:
    return set(rows.indices().tolist())


masks = st.lists(st.booleans(), min_size=2, max_size=60).map(torch.tensor)
rules = st.builds(
    WindowRule,
    window=st.integers(1, 12),
    neighbourhoods=st.integers(1, 3),
    neighbourhood_length=st.integers(1, 9),
    seed=st.integers(0, 99),
    label_reach=st.integers(1, 8),
)


@settings(max_examples=300, deadline=None)
@given(mask=masks, rule=rules)
def test_kept_rows_are_exactly_those_that_a_legal_anchor_sees(mask: Tensor, rule: WindowRule) -> None:
    kept = choose_rows("s", mask, len(mask), rule, last_hidden=True)
    spans = kept.anchor_spans
    allowed = [a for a in legal(mask) if spans is None or a in rows_in(spans)]
    assert rows_in(kept.rows[FEATURES]) == seen_by(allowed, mask, rule.window)
    assert len(kept.rows[FEATURES]) <= rule.most_rows
    if spans is not None:
        assert len(seen_by(legal(mask), mask, rule.window)) > rule.most_rows
        assert {a for a, _ in spans.ranges} | {b - 1 for _, b in spans.ranges} <= set(allowed)


@settings(max_examples=300, deadline=None)
@given(mask=masks, rule=rules)
def test_last_states_are_kept_where_a_block_predicts_the_next_token(mask: Tensor, rule: WindowRule) -> None:
    """A block at a predicts a + 1, a + 2, ... while these are supervised; t + 1 is predicted at row t."""
    kept = choose_rows("s", mask, len(mask), rule, last_hidden=True)
    spans = kept.anchor_spans
    reach = len(mask) if spans is None else rule.label_reach
    expected = set()
    for anchor in legal(mask):
        if spans is not None and anchor not in rows_in(spans):
            continue
        for slot in range(1, reach + 1):
            if anchor + slot >= len(mask) or not mask[anchor + slot]:
                break
            expected.add(anchor + slot - 1)
    assert rows_in(kept.rows[LAST]) == expected


def test_a_short_answer_costs_one_window_and_itself() -> None:
    """A prompt of 1,000,000 tokens with an answer of 2,000: under 4,100 rows are kept."""
    mask = mask_of(1_002_000, (1_000_000, 1_002_000))
    kept = choose_rows("s", mask, len(mask), WindowRule(2048, 8, 2048, 0), last_hidden=True)
    assert kept.rows[FEATURES].ranges == [(1_000_000 - 2047, 1_001_998)]
    assert kept.rows[LAST].ranges == [(1_000_000, 1_001_999)]
    assert kept.anchor_spans is None


def test_rule_all_keeps_all() -> None:
    kept = choose_rows("s", mask_of(9, (3, 6)), 8, None, last_hidden=False)
    assert (kept.rows[FEATURES].ranges, list(kept.rows), kept.anchor_spans) == ([(0, 8)], [FEATURES], None)


def test_the_choice_depends_on_seed_and_sample_alone() -> None:
    mask = mask_of(4000, (0, 4000))

    def spans(sample_id: str, seed: int) -> list[tuple[int, int]]:
        kept = choose_rows(sample_id, mask, 4000, WindowRule(16, 4, 32, seed), last_hidden=False)
        assert kept.anchor_spans is not None
        return kept.anchor_spans.ranges

    assert spans("a", 0) == spans("a", 0)
    assert len({tuple(spans("a", 0)), tuple(spans("a", 1)), tuple(spans("b", 0))}) == 3


@pytest.mark.parametrize("spread", ["everywhere", "in four answers"])
def test_every_legal_anchor_is_equally_likely_to_be_covered(spread: str) -> None:
    """Over 3,000 samples, at the edges as in the middle."""
    mask = (
        mask_of(60, (0, 60)) if spread == "everywhere" else mask_of(60, (2, 9), (20, 24), (25, 40), (57, 60))
    )
    rule = WindowRule(window=1 + 3, neighbourhoods=2, neighbourhood_length=7, seed=0)
    draws = 3000
    hits = torch.zeros(60)
    for sample in range(draws):
        spans = choose_rows(f"s{sample}", mask, 60, rule, last_hidden=False).anchor_spans
        assert spans is not None
        hits[spans.indices()] += 1
    share = hits[legal(mask)] / draws
    mean = float(share.mean())
    # A share is a mean of draws of variance mean (1 - mean): five standard errors around the common mean.
    assert float((share - mean).abs().max()) < 5 * (mean * (1 - mean) / draws) ** 0.5
    assert 0.1 < mean < 0.5


@settings(max_examples=200, deadline=None)
@given(prompt=masks, rule=st.one_of(st.none(), rules), new=st.integers(1, 20), data=st.data())
def test_rows_made_hold_the_rows_of_any_answer(
    prompt: Tensor, rule: WindowRule | None, new: int, data: st.DataObject
) -> None:
    made = rows_to_make(prompt, new, rule, last_hidden=True)
    answer = data.draw(st.integers(1, new))
    mask = torch.cat([prompt, torch.ones(answer, dtype=torch.bool)])
    kept = choose_rows("s", mask, len(mask) - 1, rule, last_hidden=True)
    for family in (FEATURES, LAST):
        assert rows_in(kept.rows[family]) <= rows_in(made[family])
