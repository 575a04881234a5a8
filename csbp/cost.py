"""Closed-form work of one training step: parameters, floating-point operations, rows, bytes on the wire.

Everything here is arithmetic on the sizes of a drafter, so a run can be judged before anything is allocated.
`csbp.footprint` adds memory, `csbp.planner` turns both into time and a choice of context ranks.

Notation as in the drafter: D width, I feed-forward width, H / G query / key-value heads, E head size,
V vocabulary, A blocks, B rows of a block, L context rows, W sliding window, P context ranks, N ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from drafter.attention import LayerMask

AnchorRule = Literal["uniform", "locality"]
GRADIENT_BYTES = 4  # gradients and weights are float32 whatever the compute dtype


class ShapeError(ValueError):
    """Sizes that no drafter or step can have."""


@dataclass(frozen=True)
class DrafterShape:
    """The sizes of a drafter that decide its cost.

    Attributes:
        hidden, intermediate, heads, kv_heads, head_size, vocabulary, block_size: the config's own numbers.
        feature_width: taps times the target's hidden size.
        masks: one per layer.
        conv_kernel: taps of the grouped dynamic convolution, 0 for a version 1 drafter.
        conv_group: channels that share a dynamic coefficient.
        selector_rank: width of the candidate selector, 0 for a version 1 drafter.
        selector_top_k: candidates of a slot.
        attention_bias: biases on the four attention projections.
        tied_head: the target's head is its embedding, so that one frozen table is held and not two.
        low_rank_selector: the selector's codebooks are trained as projections of the frozen embedding.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    feature_width: int
    block_size: int
    masks: tuple[LayerMask, ...]
    conv_kernel: int = 0
    conv_group: int = 16
    selector_rank: int = 0
    selector_top_k: int = 0
    attention_bias: bool = False
    tied_head: bool = False
    low_rank_selector: bool = False

    @property
    def layers(self) -> int:
        return len(self.masks)

    @property
    def query_width(self) -> int:
        """H * E."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """G * E, the elements of the keys (or of the values) of one row in one layer."""
        return self.kv_heads * self.head_size

    @property
    def conv_coefficients(self) -> int:
        """Dynamic coefficients of one row of one convolution: 2 sides * taps * groups; 0 without one."""
        return 2 * self.conv_kernel * (self.hidden // self.conv_group)

    @property
    def supervised_slots(self) -> int:
        """Slots of a block that predict a token; slot 0 is the anchor."""
        return self.block_size - 1

    def parameters(self) -> dict[str, int]:
        """Trainable parameters by part; the sum is the count of the released checkpoint's elements."""
        d, e = self.hidden, self.head_size
        bias = self.query_width + 2 * self.kv_width + d if self.attention_bias else 0
        projections = 2 * d * self.query_width + 2 * d * self.kv_width + bias
        convolution = 2 * (2 * self.conv_kernel * d + self.conv_coefficients * d)
        return {
            "fuse": d * self.feature_width,
            "attention": self.layers * projections,
            "mlp": self.layers * 3 * d * self.intermediate,
            "convolution": self.layers * convolution,
            "selector": self.selector_rank * (2 * (d if self.low_rank_selector else self.vocabulary) + d),
            "norms": self.layers * (2 * d + 2 * e) + 2 * d,
        }

    @property
    def parameter_count(self) -> int:
        return sum(self.parameters().values())


@dataclass(frozen=True)
class Workload:
    """What one replica trains in one micro-step.

    Attributes:
        context: rows L of one sequence.
        anchors: blocks drawn from one sequence.
        sequences: sequences of the micro-batch; the context axis is their concatenation.
        anchor_rule: `uniform` draws anchors anywhere, `locality` one block apart in neighbourhoods.
        neighbourhoods: of one sequence, evenly apart; `uniform` has none.
    """

    context: int
    anchors: int
    sequences: int = 1
    anchor_rule: AnchorRule = "uniform"
    neighbourhoods: int = 1

    def __post_init__(self) -> None:
        if self.context < 2 or self.anchors < 1 or self.sequences < 1:
            raise ShapeError(
                "a step needs a context of at least 2 rows, 1 anchor and 1 sequence; got "
                f"context={self.context}, anchors={self.anchors}, sequences={self.sequences}"
            )
        if self.anchors >= self.context:
            raise ShapeError(
                f"{self.anchors} anchors do not fit in a context of {self.context} rows, which has "
                f"{self.context - 1} anchor positions; lower anchors or raise context"
            )
        if not 1 <= self.neighbourhoods <= self.anchors:
            raise ShapeError(
                f"{self.anchors} anchors make at least 1 and at most {self.anchors} neighbourhoods, "
                f"found {self.neighbourhoods}"
            )

    @property
    def rows(self) -> int:
        """Rows of the context axis."""
        return self.context * self.sequences

    @property
    def blocks(self) -> int:
        """Blocks of the micro-step."""
        return self.anchors * self.sequences


def union_rows(work: Workload, window: int | None, block_size: int) -> float:
    """Expected context rows of the axis that at least one block can see.

    Uniform anchors are a draw of A from the L - 1 positions without replacement, so row t is needed by nobody
    with probability C(L - 1 - m, A) / C(L - 1, A), where m = min(W - 1, L - 1 - t) positions would need it.
    Anchors of a neighbourhood stand `block_size` apart, so their windows overlap (or touch) in one run;
    neighbourhoods are taken to stand further apart than a window.

    Args:
        work: the micro-step.
        window: W, or None for a layer that sees everything before the anchor.
        block_size: distance of neighbouring anchors under the locality rule.

    Returns:
        Rows, summed over the sequences; every row of the axis if `window` is None.
    """
    length, anchors = work.context, work.anchors
    if window is None:
        return float(work.rows)
    history = min(window - 1, length - 1)
    if work.anchor_rule == "locality":
        groups = work.neighbourhoods
        span = (anchors - groups) * min(block_size, history) + groups * history
        return float(min(span, length) * work.sequences)
    positions = length - 1
    base = _log_choose(positions, anchors)

    def needed(readers: int) -> float:
        free = positions - readers
        return 1.0 if free < anchors else -math.expm1(_log_choose(free, anchors) - base)

    tail = math.fsum(needed(readers) for readers in range(history))
    return work.sequences * ((length - history) * needed(history) + tail)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one part; a multiply-add counts two."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def step_flops(
    shape: DrafterShape,
    *,
    blocks: float,
    fused_rows: float,
    projected_rows: tuple[float, ...],
    pairs: tuple[float, ...],
    scored_rows: int | None = None,
    selector_fraction: float = 1.0,
    shared_search: bool = False,
) -> dict[str, Flops]:
    """Operations of the matrix products of one rank's step, by part.

    A product of a weight costs 2 m n k forward and twice that backward (one product for the input, one for
    the weight). Exceptions: features carry no gradient, so `fuse` has one backward product; the head is
    frozen and the loss makes the gradient of its rows together with the logits, so `vocabulary` is two
    products, both forward; the selector's candidates are one more search of the whole vocabulary (none with
    `shared_search`), and each costs two products with its head row (the logit and its gradient). Attention
    does two products per pair forward and five backward.

    Args:
        shape: the drafter.
        blocks: blocks of the rank.
        fused_rows: feature rows that the rank fuses.
        projected_rows: context rows that the rank projects to keys and values, per layer.
        pairs: (query row, key) pairs of the rank per layer, own block included.
        scored_rows: rows of the head that the loss scores; None for the whole vocabulary.
        selector_fraction: share of the blocks that train the selector.
        shared_search: the loss's own products give the candidates, as the GPU's kernels do.

    Returns:
        fuse, context_kv, block_projections, attention, mlp, convolution, vocabulary, candidates, selector.
    """
    d, rows, slots = shape.hidden, blocks * shape.block_size, blocks * shape.supervised_slots
    layers, chosen = shape.layers, slots * selector_fraction if shape.selector_rank else 0.0
    scored = shape.vocabulary if scored_rows is None else scored_rows

    def product(m: float, n: float, k: float) -> Flops:
        return Flops(2 * m * n * k, 4 * m * n * k)

    fused = 2 * fused_rows * shape.feature_width * d
    candidates = 2 * chosen * d * shape.selector_top_k
    search = 0.0 if shared_search else 2 * chosen * d * shape.vocabulary
    selector = product(chosen, shape.selector_rank, d * (2 if shape.low_rank_selector else 1))
    return {
        "fuse": Flops(fused, fused),
        "context_kv": product(sum(projected_rows), 2 * shape.kv_width, d),
        "block_projections": product(rows * layers, 2 * shape.query_width + 2 * shape.kv_width, d),
        "attention": pair_flops(shape, sum(pairs)),
        "mlp": product(rows * layers, 3 * shape.intermediate, d),
        "convolution": product(rows * layers, 2 * shape.conv_coefficients, d),
        "vocabulary": Flops(4 * slots * d * scored, 0.0),
        "candidates": Flops(search + candidates, candidates),
        "selector": selector,
    }


def pair_flops(shape: DrafterShape, pairs: float) -> Flops:
    """Two products of H * E per pair forward; backward the scores again, dV, dP, dQ and dK."""
    product = 2 * shape.query_width * pairs
    return Flops(2 * product, 5 * product)


def reduction_bytes(elements: int, ranks: int) -> float:
    """Bytes that a rank sends to sum float32 gradients over N ranks: 2 (N - 1) / N of the buffer."""
    return 2 * (ranks - 1) / ranks * elements * GRADIENT_BYTES


def gathering_bytes(elements: int, ranks: int) -> float:
    """Bytes that a rank sends under ZeRO so that all have the weights that each updated: (N - 1) / N."""
    return (ranks - 1) / ranks * elements * GRADIENT_BYTES
