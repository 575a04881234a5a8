"""Chooses how many ranks share one sequence, before anything is allocated.

For every divisor P of N ranks it estimates the peak bytes of the most loaded rank and the time of a step,
so a run that cannot fit is refused with what would fit, and N / P replicas follow from the choice of P.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from csbp.cost import DrafterShape, Workload, gathering_bytes, pair_flops, reduction_bytes, step_flops
from csbp.device import DeviceConstants
from csbp.footprint import WIDE, StepSettings, block_row_bytes, fits, peak_moment
from csbp.ownership import StepCost
from csbp.share import RankShare, replica_share

GIB = 2**30
CLEAR_GAIN = 0.10  # a larger P has to be faster by more than the estimate's own error
HEADROOM = 0.08  # of the memory: allocator fragments, CUDA context, communicators
UPDATE_ACCESSES = 7  # AdamW reads parameter, gradient and two moments, and writes all but the gradient
_LARGEST_WORLD = 32  # that a refusal looks at; pricing placements takes time of order P^2


class PlanError(ValueError):
    """No number of context ranks fits."""


def _made_again(settings: StepSettings) -> list[str]:
    """Parts of a step whose forward products the backward pass repeats."""
    context = ["fuse", "context_kv"] if settings.recompute_context else []
    blocks = ["block_projections", "mlp", "convolution"] if settings.recompute_blocks else []
    return context + blocks


@dataclass(frozen=True)
class Candidate:
    """One P.

    Attributes:
        context_ranks, replicas: P and N / P.
        placement, transports: how blocks and rows are dealt out, and the transport of each layer.
        moment: when in the step the most loaded rank holds most.
        peak: its bytes by part at that moment.
        fits: whether the peak leaves the headroom free.
        time: seconds of a step by part.
        tokens: supervised tokens of one replica's step.
        sent_bytes: context bytes that a rank sends in a step.
        feature_rows: rows that a rank reads.
    """

    context_ranks: int
    replicas: int
    placement: str
    transports: tuple[str, ...]
    moment: str
    peak: dict[str, float]
    fits: bool
    time: dict[str, float]
    tokens: int
    sent_bytes: float
    feature_rows: float

    @property
    def peak_bytes(self) -> float:
        return sum(self.peak.values())

    @property
    def step_seconds(self) -> float:
        return sum(self.time.values())

    @property
    def group_rate(self) -> float:
        """Supervised tokens a second of one replica group of P ranks."""
        return self.tokens / self.step_seconds

    @property
    def fleet_rate(self) -> float:
        """Supervised tokens a second of all N ranks."""
        return self.replicas * self.group_rate

    def to_dict(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "peak_gib": self.peak_bytes / GIB,
            "step_seconds": self.step_seconds,
            "group_tokens_per_second": self.group_rate,
            "fleet_tokens_per_second": self.fleet_rate,
        }


@dataclass(frozen=True)
class Question:
    """What is to be planned.

    Attributes:
        shape, work, settings: the drafter, a replica's micro-step, and how it is computed.
        world: N ranks.
        device: of each rank.
        headroom: fraction of the device's memory that stays free.
    """

    shape: DrafterShape
    work: Workload
    settings: StepSettings
    world: int
    device: DeviceConstants
    headroom: float = HEADROOM


@dataclass(frozen=True)
class Plan:
    """Every divisor of N, and the choice.

    Attributes:
        candidates: by ascending P.
        chosen: the candidate to run.
        verdicts: for each candidate, why it is or is not the choice.
    """

    candidates: tuple[Candidate, ...]
    chosen: Candidate
    verdicts: tuple[str, ...]


def make_plan(question: Question) -> Plan:
    """Estimate every P and choose.

    The smallest P that fits is chosen, since it leaves most replicas, unless a larger one is faster by more
    than 10 % of the fleet's rate.

    Raises:
        PlanError: none fits; the message says which memory, number of ranks or ZeRO stage would.
    """
    found = candidates(question)
    fitting = [candidate for candidate in found if candidate.fits]
    if not fitting:
        raise PlanError(_refusal(question, found))
    chosen = fitting[0]
    fastest = max(fitting, key=lambda candidate: candidate.fleet_rate)
    if fastest.fleet_rate > (1 + CLEAR_GAIN) * chosen.fleet_rate:
        chosen = fastest
    verdicts = tuple(_verdict(candidate, chosen) for candidate in found)
    return Plan(tuple(found), chosen, verdicts)


def choose_context_ranks(question: Question) -> int:
    """P for `context_ranks: auto`. Raises PlanError like `make_plan`."""
    return make_plan(question).chosen.context_ranks


def candidates(question: Question) -> list[Candidate]:
    """One candidate for every divisor of N, by ascending P."""
    return [_estimate(question, ranks) for ranks in _divisors(question.world)]


def step_cost(shape: DrafterShape, device: DeviceConstants, wire_bytes: int) -> StepCost:
    """What ownership and transports go by on this device, for the run and for its plan."""
    return StepCost.from_shape(
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_size,
        features=shape.feature_width,
        vocabulary=shape.vocabulary,
        layers=shape.layers,
        block_size=shape.block_size,
        wire_bytes=wire_bytes,
        byte=device.matmul_flops * device.matmul_efficiency / device.link_bandwidth,
    )


def _estimate(question: Question, ranks: int) -> Candidate:
    shape, settings = question.shape, question.settings
    share = replica_share(
        shape,
        question.work,
        ranks,
        step_cost(shape, question.device, settings.compute_bytes),
        wire_bytes=settings.compute_bytes,
        retain=settings.retain,
        placement=settings.placement,
        transports=settings.transports,
    )
    peaks = [peak_moment(shape, rank, settings, question.world) for rank in share.ranks]
    moment, peak = max(peaks, key=lambda item: sum(item[1].values()))
    times = [step_time(question, rank, ranks) for rank in share.ranks]
    return Candidate(
        context_ranks=ranks,
        replicas=question.world // ranks,
        placement=share.placement,
        transports=share.transports,
        moment=moment,
        peak=peak,
        fits=fits(peak, question.device.memory_bytes, question.headroom),
        time=max(times, key=lambda parts: sum(parts.values())),
        tokens=question.work.blocks * shape.supervised_slots,
        sent_bytes=max(rank.sent_bytes for rank in share.ranks),
        feature_rows=max(rank.feature_rows for rank in share.ranks),
    )


def step_time(question: Question, share: RankShare, ranks: int) -> dict[str, float]:
    """Seconds of one micro-step of a rank and the update after it, by part.

    Products (of the context rows, of the block layers, with the head) and attention run at the device's
    reached rates. `memory traffic` moves every kept activation
    three times (written, read, its gradient). Context bytes travel behind the attention of the same layer,
    so only what takes longer is exposed. The reduction of gradients runs behind the backward pass too, but
    is counted whole, since nobody has measured how much of it a device hides.
    """
    shape, settings, device, world = question.shape, question.settings, question.device, question.world
    flops = step_flops(
        shape,
        blocks=share.blocks,
        fused_rows=share.feature_rows,
        projected_rows=tuple(layer.own_rows for layer in share.layers),
        pairs=tuple(layer.pairs for layer in share.layers),
        scored_rows=settings.vocabulary_sample or shape.vocabulary,
        selector_fraction=settings.selector_fraction,
        shared_search=settings.tensor_cores and not settings.vocabulary_sample,
    )
    attention_rate = device.matmul_flops * device.attention_efficiency
    attention = flops.pop("attention").total / attention_rate
    again = _made_again(settings)
    rate = device.matmul_flops * device.matmul_efficiency

    def products(*names: str) -> float:
        done = (flops[name].total + (flops[name].forward if name in again else 0.0) for name in names)
        return sum(done) / rate

    kept = shape.layers * share.blocks * shape.block_size * block_row_bytes(shape, settings)
    exposed = 0.0
    for layer in share.layers:
        if layer.forward_bytes:
            sent = (layer.forward_bytes + layer.backward_bytes) / device.link_bandwidth
            exposed += max(0.0, sent - pair_flops(shape, layer.pairs).total / attention_rate)
            exposed += 2 * (ranks - 1) * device.link_latency
    stage, parameters = settings.zero_stage, shape.parameter_count
    reduction = reduction_bytes(parameters, world) + (gathering_bytes(parameters, world) if stage else 0.0)
    updated = parameters / (world if stage else 1)
    read = share.feature_rows * shape.feature_width * settings.feature_bytes
    time = {
        "context rows": products("fuse", "context_kv"),
        "block layers": products("block_projections", "mlp", "convolution"),
        "head": products("vocabulary", "candidates", "selector"),
        "attention": attention,
        "memory traffic": 3 * kept / device.memory_bandwidth,
        "context transport": exposed,
        "gradient reduction": reduction / device.link_bandwidth + 2 * (world - 1) * device.link_latency,
        "update": UPDATE_ACCESSES * WIDE * updated / device.memory_bandwidth,
    }
    if device.disk_read is not None:
        # features are read behind the step before, so only a slower disk shows
        time["feature reads"] = max(0.0, read / device.disk_read - sum(time.values()))
    return time


def _refusal(question: Question, found: list[Candidate]) -> str:
    best = min(found, key=lambda candidate: candidate.peak_bytes)
    memory = question.device.memory_bytes
    largest, size = max(best.peak.items(), key=lambda item: item[1])
    tried = ", ".join(str(candidate.context_ranks) for candidate in found)
    return (
        f"expected a rank's peak to fit in {memory * (1 - question.headroom) / GIB:.1f} GiB "
        f"({memory / GIB:.1f} GiB less {question.headroom:.0%} headroom), but the smallest over "
        f"P = {tried} is {best.peak_bytes / GIB:.1f} GiB at P = {best.context_ranks}, of which {largest} "
        f"takes {size / GIB:.1f} GiB. It would fit with {', or with '.join(_remedies(question, best))}"
    )


def _remedies(question: Question, best: Candidate) -> list[str]:
    """The smallest change of each kind that fits."""
    found = [f"{best.peak_bytes / (1 - question.headroom) / GIB:.1f} GiB of memory a rank"]
    found += _other_scale(question)
    blocks = _most_anchors(question)
    if blocks:
        found.append(f"{blocks} anchors a sequence instead of {question.work.anchors}")
    return found


def _other_scale(question: Question) -> list[str]:
    """The lowest ZeRO stage that fits on these ranks, and the fewest more ranks at the lowest stage."""
    given = question.settings.zero_stage
    found: list[str] = []
    stages: list[Literal[0, 1, 2]] = [stage for stage in (0, 1, 2) if stage >= given]
    world = question.world
    while world <= max(question.world, _LARGEST_WORLD):
        for stage in stages:
            settings = dataclasses.replace(question.settings, zero_stage=stage)
            if not _fits(dataclasses.replace(question, world=world, settings=settings)):
                continue
            words = f" and ZeRO stage {stage}" if stage > given else ""
            if world > question.world:
                return [*found, f"{world} ranks{words}"]
            found.append(words.removeprefix(" and "))
            break
        world *= 2
    return found


def _fits(question: Question) -> bool:
    return any(_estimate(question, ranks).fits for ranks in reversed(_divisors(question.world)))


def _most_anchors(question: Question) -> int:
    """Most anchors that fit, a power of two; 0 if not even one does."""
    anchors = 1 << (question.work.anchors.bit_length() - 1)
    while anchors:
        work = dataclasses.replace(question.work, anchors=anchors)
        if anchors < question.work.anchors and _fits(dataclasses.replace(question, work=work)):
            return anchors
        anchors //= 2
    return 0


def _verdict(candidate: Candidate, chosen: Candidate) -> str:
    if candidate is chosen:
        return "chosen"
    if not candidate.fits:
        largest, size = max(candidate.peak.items(), key=lambda item: item[1])
        return f"does not fit; {largest} takes {size / GIB:.1f} GiB"
    ratio = candidate.fleet_rate / chosen.fleet_rate
    slower = (
        f"fleet at {ratio:.0%} of the chosen rate with {candidate.replicas} of {chosen.replicas} replicas"
    )
    if candidate.context_ranks > chosen.context_ranks:
        return slower if ratio < 1 else f"{slower}; a gain below the estimate's error"
    return slower


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
