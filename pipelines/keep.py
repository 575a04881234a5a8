"""Which rows of a sample a store keeps.

`all` keeps every row. `windows` keeps what blocks of a drafter with sliding layers can see: rows
[a - W + 1, a) of an anchor a, W being the window (`csbp.visibility`). If these rows of all legal anchors are
at most N (T + W - 1), they are kept: a long prompt with a short answer costs little more than one window.
Otherwise N neighbourhoods of T tokens are chosen, and anchors are drawn from them alone.

Choosing: the token axis is cut into cells of T tokens, shifted by a random offset; N of the cells that hold a
legal anchor are taken, every choice of N being equally likely. Each legal anchor lies in one such cell
whatever the offset, so all of them are equally likely to be covered, those at the edges too. Offset and
choice come from (seed, sample id): a resumed capture makes the same.

Shape legend: n legal anchors.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from csbp.rows import RowSet
from pipelines.anchors import Tokens, legal_anchors
from pipelines.rowformat import FEATURES, LAST
from pipelines.store_schema import KEEP_ALL
from pipelines.store_table import ranges_table

LABEL_REACH = 64  # a block that begins in a neighbourhood predicts at most this many tokens


@dataclass(frozen=True)
class WindowRule:
    """The rule `windows`.

    Attributes:
        window: W, rows that a sliding layer sees; it counts the query itself.
        neighbourhoods: N, chosen in a sample that is supervised almost everywhere.
        neighbourhood_length: T, tokens of one.
        seed: of the choice.
        label_reach: tokens behind an anchor for which last hidden states are stored.
    """

    window: int
    neighbourhoods: int
    neighbourhood_length: int
    seed: int
    label_reach: int = LABEL_REACH

    @property
    def most_rows(self) -> int:
        """No sample keeps more."""
        return self.neighbourhoods * (self.neighbourhood_length + self.window - 1)

    def to_dict(self) -> dict[str, Any]:
        """As the manifest has it."""
        return {"rule": "windows", **asdict(self)}


@dataclass(frozen=True)
class Kept:
    """What a store holds of a sample.

    Attributes:
        rows: family of rows -> which are stored; no entry for last hidden states means that none are.
        anchor_spans: tokens that anchors may be drawn from; None for no limit.
    """

    rows: dict[str, RowSet]
    anchor_spans: RowSet | None = None

    def fields(self, num_rows: int, rule: WindowRule | None) -> dict[str, Any]:
        """The fields of a `TokenSample` that say so."""
        return {
            "num_rows": num_rows,
            "kept": None if rule is None else ranges_table(self.rows[FEATURES]),
            "anchor_spans": None if self.anchor_spans is None else ranges_table(self.anchor_spans),
            "last_rows": ranges_table(self.rows[LAST]) if LAST in self.rows else None,
        }


def keep_dict(rule: WindowRule | None) -> dict[str, Any]:
    """`Manifest.keep` of a rule; None keeps all."""
    return dict(KEEP_ALL) if rule is None else rule.to_dict()


def choose_rows(
    sample_id: str, loss_mask: Tensor, num_rows: int, rule: WindowRule | None, *, last_hidden: bool
) -> Kept:
    """Rows of one document that are stored.

    Args:
        sample_id: names the random choice.
        loss_mask: bool [L].
        num_rows: rows that the target makes of it.
        rule: None keeps all.
        last_hidden: also choose the rows whose last hidden state is stored: those at which a block predicts
            the next token.
    """
    legal = _legal(sample_id, loss_mask)
    chosen, spans = legal, None
    rows = RowSet.of([(0, num_rows)])
    if rule is not None:
        rows = visible_rows(legal, rule.window)
        if len(rows) > rule.most_rows:
            chosen, spans = _neighbourhoods(legal, sample_id, rule)
            rows = visible_rows(chosen, rule.window)
    kept = {FEATURES: rows}
    if last_hidden:
        labels = legal if spans is None or rule is None else _labels(legal, chosen, rule.label_reach)
        kept[LAST] = RowSet.union_of(labels, labels + 1)
    return Kept(kept, spans)


def rows_to_make(
    prompt_mask: Tensor, new_tokens: int, rule: WindowRule | None, *, last_hidden: bool
) -> dict[str, RowSet]:
    """Rows of a request that may be stored, whatever the target answers with at most `new_tokens` tokens."""
    mask = torch.cat([prompt_mask, torch.ones(new_tokens, dtype=torch.bool)])
    legal = _legal("", mask)
    rows = RowSet.of([(0, len(mask))]) if rule is None else visible_rows(legal, rule.window)
    return {FEATURES: rows} | ({LAST: RowSet.union_of(legal, legal + 1)} if last_hidden else {})


def visible_rows(anchors: Tensor, window: int) -> RowSet:
    """Context rows that blocks at int64 `anchors` [n] of one document see through a window."""
    return RowSet.union_of((anchors - window + 1).clamp(min=0), anchors)


def _legal(sample_id: str, loss_mask: Tensor) -> Tensor:
    return legal_anchors(Tokens(sample_id, loss_mask, loss_mask, torch.zeros(1, dtype=torch.int64)))


def _neighbourhoods(legal: Tensor, sample_id: str, rule: WindowRule) -> tuple[Tensor, RowSet]:
    """(anchors in the chosen cells, the cells cut to their first and last anchor)."""
    length = rule.neighbourhood_length
    offset = int(_random_words(1, rule.seed, sample_id, "offset")[0] % length)
    cell_of = (legal - legal[0] + offset) // length
    cells = cell_of.unique()
    keys = _random_words(len(cells), rule.seed, sample_id, "cells")
    taken = cells[torch.from_numpy(np.argsort(keys, kind="stable")[: rule.neighbourhoods])].sort().values
    first = torch.searchsorted(cell_of, taken)
    last = torch.searchsorted(cell_of, taken, right=True) - 1
    return legal[torch.isin(cell_of, taken)], RowSet.union_of(legal[first], legal[last] + 1)


def _labels(legal: Tensor, chosen: Tensor, reach: int) -> Tensor:
    """Legal anchors at most `reach` - 1 behind a chosen one with only legal ones between: rows of labels."""
    before = torch.searchsorted(chosen, legal, right=True) - 1
    anchor = chosen[before.clamp(min=0)]
    distance = legal - anchor
    between = torch.arange(len(legal)) - torch.searchsorted(legal, anchor)
    return legal[(before >= 0) & (distance < reach) & (distance == between)]


def _random_words(count: int, seed: int, sample_id: str, use: str) -> np.ndarray:
    """uint64 [count] from a Philox stream named by its arguments; NumPy keeps it across versions."""
    name = f"{seed}\0{sample_id}\0{use}".encode()
    key = np.frombuffer(hashlib.blake2b(name, digest_size=16).digest(), dtype=np.uint64)
    return np.random.Philox(key=key).random_raw(count)
