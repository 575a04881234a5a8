"""The engine's average over ranks: one update, whatever the ZeRO stage, bucket size and order of arrival."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from csbp.cost import gathering_bytes, reduction_bytes
from csbp.processes import run_ranks
from pipelines.optimization import Engine, OptimizerConfig
from pipelines.reduction import _buckets

SIZES = (3, 70, 4, 20, 5)
TINY = 64  # elements: less than the second parameter has, enough for several of the others
STEPS, ACCUMULATION, RANKS = 3, 2, 2
CONFIG = OptimizerConfig(lr=0.1, clip=0.5)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(size, 2, generator=generator) for size in SIZES)

    def loss(self, rank: int, step: int, micro: int) -> torch.Tensor:
        """Rank 1 reaches two parameters, the other way round; its second micro-batch reaches none."""
        if rank and micro:
            return torch.zeros(())
        reached = [self.weights[3], self.weights[1]] if rank else list(self.weights)
        return sum(
            ((weight - 0.1 * step - rank - micro) ** 2).mean() * (i + 1) for i, weight in enumerate(reached)
        )


def train(stage: int, bucket: int, ranks: tuple[int, ...]) -> tuple[list[torch.Tensor], list[float], int]:
    """Weights, norms and bytes after `STEPS`; several `ranks` on one process are summed by hand."""
    model = Model()
    engine = Engine(model, CONFIG, stage, bucket)
    norms = []
    for step in range(STEPS):
        for micro in range(ACCUMULATION):
            losses = [model.loss(rank, step, micro) for rank in ranks]
            engine.backward(sum(losses) / len(losses), last=micro + 1 == ACCUMULATION)
        norms.append(engine.update(CONFIG.lr))
    return [weight.detach().clone() for weight in model.weights], norms, engine.sent_bytes


def worker() -> dict[tuple[int, int], tuple]:
    rank = dist.get_rank()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    return {
        (stage, bucket): (*train(stage, bucket, (rank,)), counted(stage, bucket, rank))
        for stage in (0, 1, 2)
        for bucket in (TINY, 1000)
    }


def counted(stage: int, bucket: int, rank: int) -> float:
    """Bytes by the count of rings, at the collectives that a run really called."""
    import deepspeed

    backend = deepspeed.comm.comm.cdb
    reduce, gather, sent = dist.all_reduce, backend.all_gather_function, 0.0

    def all_reduce(tensor, *rest, **more):
        nonlocal sent
        if tensor.numel() > 1:  # a norm is no gradient
            sent += 2 * (RANKS - 1) / RANKS * tensor.numel() * 4
        return reduce(tensor, *rest, **more)

    def all_gather(output_tensor, **more):
        nonlocal sent
        sent += (RANKS - 1) / RANKS * output_tensor.numel() * 4
        return gather(output_tensor=output_tensor, **more)

    dist.all_reduce, backend.all_gather_function = all_reduce, all_gather
    try:
        train(stage, bucket, (rank,))
    finally:
        dist.all_reduce, backend.all_gather_function = reduce, gather
    return sent


@pytest.mark.ranks
def test_stages_buckets_and_orders_give_one_update(tmp_path):
    from pipelines.ranks import join_ranks

    join_ranks()
    expected, norms, sent = train(0, 1000, (0, 1))
    assert sent == 0
    elements = sum(weight.numel() for weight in expected)
    padding = 4 * 16  # ZeRO pads a flat group to a multiple of the ranks and of an alignment
    for results in run_ranks(worker, RANKS):
        for (stage, _), (weights, found, said, at_collectives) in results.items():
            assert found == pytest.approx(norms, rel=1e-5)
            for weight, other in zip(weights, expected, strict=True):
                torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-6)
            sums = STEPS * (ACCUMULATION if stage == 2 else 1)
            gathers = STEPS if stage else 0
            parts = sums * reduction_bytes(elements, RANKS), gathers * gathering_bytes(elements, RANKS)
            assert said == sum(parts)
            assert at_collectives == pytest.approx(said, abs=STEPS * ACCUMULATION * padding * 4)


def test_buckets_go_backwards_and_a_large_parameter_has_its_own():
    weights = list(Model().weights)
    sizes = [[weight.numel() for weight in run] for run in _buckets(weights, TINY)]
    assert sizes == [[10, 40, 8], [140], [6]]
    assert [len(run) for run in _buckets(weights, 1000)] == [5]
