"""Peak bytes of one rank, by part, at each moment of a training step.

A step is followed through the moments at which memory can peak: the vocabulary loss after the forward pass,
the backward pass of each layer, and the optimizer. What a layer keeps for its backward pass is counted
tensor by tensor, as the drafter's modules save them. Parameters are float32 whatever the compute dtype
(autocast makes the narrow copies), so they are their own masters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from csbp.choice import Placement
from csbp.cost import DrafterShape
from csbp.routes import Transport
from csbp.share import LayerShare, RankShare
from drafter.vocabulary import chunk_rows

WIDE = 4  # parameters, gradients, moments, residual stream, softmax and loss statistics: float32
REDUCTION_BUCKET = 1 << 25  # gradients averaged at once: 128 MiB, enough to fill a link, little to hold
BUCKETS_IN_FLIGHT = 4  # at stages 0 and 1; what is started beyond them waits for the oldest

ROW_TILE, VOCABULARY_TILE = 512, 2048  # of a tile of logits (the objective's defaults)
ATTENTION_PRODUCTS, MLP_PRODUCTS = 3, 2  # that read the normed rows: q, k, v; gate, up
CONTEXT_CHUNK = 4096  # context rows that are widened, or made again, at a time (the drafter's default)

Recompute = Literal[
    "none", "context", "blocks", "all"
]  # what a backward pass makes again instead of keeping it


@dataclass(frozen=True)
class StepSettings:
    """How a step is computed, where it changes bytes or time.

    Attributes:
        compute_bytes: of a matrix product's element: 4 for fp32, 2 for bf16 under autocast.
        feature_bytes: of a stored feature element.
        zero_stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, over all ranks.
        vocabulary_sample: rows of the head that the loss scores, 0 for all.
        selector_fraction: share of the blocks that train the selector.
        prefetch: micro-batches of features that wait in the same memory as the step.
        accumulate: gradients of earlier micro-batches are alive.
        tensor_cores: narrow products accumulate in float32 by themselves, so the loss casts no head rows.
        retain: received shards that a ring keeps, as in `csbp.plan.plan_step`; None keeps all.
        recompute_context: context rows are made again in the backward pass, chunk by chunk.
        recompute_blocks: block activations are, layer by layer.
        placement: who owns what, as in `plan_step`.
        transports: how context rows reach the blocks: one way for all layers, or one a layer.
    """

    compute_bytes: int = 2
    feature_bytes: int = 2
    zero_stage: Literal[0, 1, 2] = 0
    vocabulary_sample: int = 0
    selector_fraction: float = 1.0
    prefetch: int = 0
    accumulate: bool = False
    tensor_cores: bool = True
    retain: int | None = None
    recompute_context: bool = False
    recompute_blocks: bool = False
    placement: Placement | Literal["auto"] = "auto"
    transports: tuple[Transport | Literal["auto"], ...] = ("auto",)

    @property
    def narrow(self) -> bool:
        """Autocast is on: products run on narrow copies of wide tensors, which their backward pass keeps."""
        return self.compute_bytes < WIDE


def peak_moment(
    shape: DrafterShape, share: RankShare, settings: StepSettings, world: int
) -> tuple[str, dict[str, float]]:
    """The moment of the step at which a rank holds most, and its bytes by part."""
    return max(moments(shape, share, settings, world).items(), key=lambda item: sum(item[1].values()))


def moments(
    shape: DrafterShape, share: RankShare, settings: StepSettings, world: int
) -> dict[str, dict[str, float]]:
    """Bytes by part at every moment where memory can peak.

    Args:
        shape: the drafter.
        share: the rank's rows and blocks.
        settings: of the step.
        world: N, all ranks, over which ZeRO shards.
    """
    step = _Step(shape, share, settings, world)
    found = {"fuse": step.fuse(), "loss": step.vocabulary_loss()}
    for layer in reversed(range(shape.layers)):
        found[f"backward {layer}"] = step.backward(layer)
    found["backward end"] = step.backward_fusion()
    found["update"] = step.optimizer()
    return found


@dataclass(frozen=True)
class _Step:
    shape: DrafterShape
    share: RankShare
    settings: StepSettings
    world: int

    @property
    def block_rows(self) -> int:
        return self.share.blocks * self.shape.block_size

    @property
    def slots(self) -> int:
        return self.share.blocks * self.shape.supervised_slots

    def state(self, done: float, *, reducing: bool = True) -> dict[str, float]:
        """What does not depend on rows or blocks.

        Args:
            done: parameters whose gradients of this micro-batch exist.
            reducing: gradients are being averaged.
        """
        parameters, settings = float(self.shape.parameter_count), self.settings
        sharded = self.world if settings.zero_stage else 1
        master = WIDE * parameters / self.world if settings.zero_stage else 0.0
        tables = 1 if self.shape.tied_head else 2
        features = self.share.feature_rows * self.shape.feature_width * settings.feature_bytes
        if settings.zero_stage == 2:
            gradients = parameters / self.world + min(REDUCTION_BUCKET, done)
        else:
            gradients = parameters if settings.accumulate else done
        return {
            "weights": WIDE * parameters,
            "frozen tables": tables * self.shape.vocabulary * self.shape.hidden * settings.compute_bytes,
            "optimizer state": 2 * WIDE * parameters / sharded + master,
            "features": features,
            "feature prefetch": settings.prefetch * features,
            "gradients": WIDE * gradients,
            "reduction buckets": self._buckets(done) if reducing else 0.0,
        }

    def _buckets(self, done: float) -> float:
        """Copies of gradients on their way, and DeepSpeed's own buckets under ZeRO: two where it averages."""
        stage, alone = self.settings.zero_stage, self.world == 1
        copies = 0.0 if alone or stage == 2 else min(BUCKETS_IN_FLIGHT * REDUCTION_BUCKET, done)
        whole = 0 if stage == 0 else 2 if stage == 2 and not alone else 1
        return WIDE * (copies + whole * min(REDUCTION_BUCKET, self.shape.parameter_count))

    def context(self, layers: int, *, chunk: bool = False) -> dict[str, float]:
        """Fused rows, and the keys and values of the first `layers` layers; `chunk`: some are being made."""
        rows, c = self.share.feature_rows, self.settings.compute_bytes
        made = min(rows, CONTEXT_CHUNK) if chunk else 0
        copies = 0 if self.settings.feature_bytes == c else c
        fused = 2 * self.shape.hidden * c + WIDE
        selected = sum(self.share.selections) * self.shape.hidden * c
        return {
            "feature copy": made * self.shape.feature_width * copies,
            "fused rows": made * fused if self.settings.recompute_context else rows * fused + selected,
            "context keys and values": sum(map(self._context_layer, self.share.layers[:layers])),
            "received rows": sum(layer.kept_bytes for layer in self.share.layers[:layers]),
        }

    def _context_layer(self, layer: LayerShare) -> float:
        """Keys before and after their norm, values, norm statistics; what is made again keeps the results."""
        keys_values = 2 * self.shape.kv_width * self.settings.compute_bytes
        if self.settings.recompute_context:
            return layer.own_rows * keys_values
        return layer.own_rows * (1.5 * keys_values + WIDE * self.shape.kv_heads)

    def key_value_gradients(self, layer: int) -> float:
        """What waits for the backward pass of the context: fused rows' gradient, or that of later layers'
        keys and values.
        """
        element = self.settings.compute_bytes
        if not self.settings.recompute_context:
            return self.share.feature_rows * self.shape.hidden * element
        rows = sum(later.own_rows for later in self.share.layers[layer + 1 :])
        return rows * 2 * self.shape.kv_width * element

    def chunk_again(self) -> float:
        """A chunk's forward and backward pass: norms work on wide copies of their rows and gradients."""
        fused = 4 * self.shape.hidden * WIDE
        layer = self.shape.kv_width * (3 * self.settings.compute_bytes + 2 * WIDE)
        return min(self.share.feature_rows, CONTEXT_CHUNK) * (fused + self.shape.layers * layer)

    def blocks(self, layers: int) -> float:
        return layers * self.block_rows * block_row_bytes(self.shape, self.settings)

    def blocks_again(self) -> float:
        """One layer's second half, the larger one, while its backward pass has made it again."""
        if not self.settings.recompute_blocks:
            return 0.0
        hidden = WIDE * self.shape.hidden + 4 * self.settings.compute_bytes * self.shape.intermediate
        return self.block_rows * (hidden + _sublayer_bytes(self.shape, self.settings, MLP_PRODUCTS))

    def casts(self) -> float:
        """Narrow copies of the weights of products, alive until the backward pass is over."""
        parts = self.shape.parameters()
        products = sum(parts[name] for name in ("fuse", "attention", "mlp", "convolution"))
        return self.settings.compute_bytes * products if self.settings.narrow else 0.0

    def fuse(self) -> dict[str, float]:
        return {
            **self.state(0, reducing=False),
            **self.context(0, chunk=True),
            "weight copies": self.casts(),
        }

    def vocabulary_loss(self) -> dict[str, float]:
        """The loss keeps supervised rows and their gradient; logits exist in tiles, two in the selector.

        A GPU's kernels take chunks of rows instead: their products and the weights made of them.
        """
        wide_row = self.shape.hidden * WIDE
        if self.settings.tensor_cores:
            scored, element = (
                self.settings.vocabulary_sample or self.shape.vocabulary,
                self.settings.compute_bytes,
            )
            rows = min(self.slots, chunk_rows(math.ceil(self.slots), scored, element))
            tiles = rows * (scored * (WIDE + element) + 2 * wide_row)
        else:
            rows, width = min(self.slots, ROW_TILE), min(self.shape.vocabulary, VOCABULARY_TILE)
            tiles = (2 if self.shape.selector_rank else 1) * rows * width * WIDE + 2 * rows * wide_row
            tiles += width * wide_row if self.settings.narrow else 0
        return {
            **self.state(0, reducing=False),
            **self.context(self.shape.layers),
            "block activations": self.blocks(self.shape.layers),
            "weight copies": self.casts(),
            "vocabulary loss": (self.block_rows + 2 * self.slots) * wide_row + tiles,
        }

    def backward(self, layer: int) -> dict[str, float]:
        parts = self.shape.parameters()
        per_layer = (parts["attention"] + parts["mlp"] + parts["convolution"]) / self.shape.layers
        done = (self.shape.layers - layer) * per_layer + parts["selector"]
        element = self.settings.compute_bytes
        widest = 3 * self.shape.intermediate * element + 2 * self.shape.hidden * WIDE
        # gradients of keys and values are summed wide and narrowed where rows are narrow
        wide_and_narrow = WIDE + (element if self.settings.narrow else 0)
        context = self.share.layers[layer].own_rows * 2 * self.shape.kv_width * wide_and_narrow
        return {
            **self.state(done),
            **self.context(layer + 1),
            "block activations": self.blocks(layer + 1) + self.blocks_again(),
            "weight copies": self.casts(),
            "backward temporaries": self.block_rows * widest + context,
            "context gradient": self.key_value_gradients(layer),
            "messages": self.share.layers[layer].moving_bytes,
        }

    def backward_fusion(self) -> dict[str, float]:
        if self.settings.recompute_context:
            gradient = self.key_value_gradients(-1) + self.chunk_again()
        else:
            gradient = 2 * self.share.feature_rows * self.shape.hidden * WIDE
        return {
            **self.state(self.shape.parameter_count),
            **self.context(0, chunk=True),
            "weight copies": self.casts(),
            "context gradient": gradient,
        }

    def optimizer(self) -> dict[str, float]:
        """ZeRO flattens the gradients of a rank's share once more; its buckets are free by then."""
        stage, count = self.settings.zero_stage, float(self.shape.parameter_count)
        parts = self.state(count, reducing=False)
        if stage:
            held = count if stage == 1 else count / self.world
            parts["gradients"] = WIDE * (held + count / self.world)
        return parts


def block_row_bytes(shape: DrafterShape, settings: StepSettings) -> float:
    """Bytes that one layer keeps for one block row until its backward pass."""
    c, d = settings.compute_bytes, shape.hidden
    # attention keeps packed queries, keys, values, and its output and log-sum-exp wide
    attended = c * (shape.query_width + 2 * shape.kv_width) + WIDE * (shape.query_width + shape.heads)
    if settings.recompute_blocks:
        return WIDE * d + c * (shape.query_width + shape.conv_coefficients) + attended
    sublayers = sum(_sublayer_bytes(shape, settings, count) for count in (ATTENTION_PRODUCTS, MLP_PRODUCTS))
    heads = shape.heads + shape.kv_heads
    projections = c * (2 * shape.query_width + 3 * shape.kv_width) + WIDE * heads
    # attention keeps its output and log-sum-exp wide; o_proj keeps its input
    mixed = (c + WIDE) * shape.query_width + WIDE * shape.heads
    return sublayers + projections + mixed + c * 4 * shape.intermediate


def _sublayer_bytes(shape: DrafterShape, settings: StepSettings, products: int) -> float:
    """Norm and convolutions around one sublayer, a row; `products` read what they give."""
    c, d = settings.compute_bytes, shape.hidden
    kept = WIDE * (d + 1)  # the norm's input (the residual stream) and its statistic
    if shape.conv_kernel:
        kept += WIDE * d + c * shape.conv_coefficients + c * d  # normed rows, coefficients, output
        kept += c * d * (products + 1) if settings.narrow else WIDE * d
    else:
        kept += c * d * products if settings.narrow else WIDE * d
    return kept


def fits(parts: Mapping[str, float], memory_bytes: float, headroom: float) -> bool:
    """Whether the parts leave `headroom` (a fraction) of the memory free."""
    return sum(parts.values()) <= memory_bytes * (1 - headroom)
