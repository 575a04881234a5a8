"""What the planner is told about a run, and that a run deals its blocks by the planner's prices."""

from __future__ import annotations

import pytest
import torch

from csbp.device import device_constants
from csbp.planner import step_cost
from drafter.config import DrafterConfig
from pipelines.grid import make_cost, step_settings
from pipelines.plan import drafter_shape, this_device
from pipelines.ranks import join_ranks, ranks_of_this_machine, require_same
from tests.pipelines.tiny_run import make_run

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TARGET = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 8, "vocab_size": 100}


@pytest.fixture
def drafter():
    config = {**TARGET, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16}
    return DrafterConfig.for_target({**config, "max_position_embeddings": 64}, mask_token_id=99)


@pytest.mark.parametrize("device", ["h200", "cpu"])
def test_a_run_and_its_plan_have_the_same_prices(tmp_path, drafter, device):
    join_ranks()
    config = make_run(tmp_path, precision="bf16", parallel={"device": device})
    assert make_cost(config, drafter, GPU) == step_cost(drafter_shape(drafter), device_constants(device), 2)
    assert make_cost(config, drafter, CPU) == step_cost(drafter_shape(drafter), device_constants(device), 4)


def test_rates_of_a_run_are_those_asked_for_with_the_memory_of_this_machine():
    asked, here = this_device(2, "h200"), this_device(2)
    assert asked.link_bandwidth == device_constants("h200").link_bandwidth
    assert asked.memory_bytes == pytest.approx(here.memory_bytes, rel=0.1)


def test_a_gpu_holds_one_more_batch_when_it_is_copied_ahead(tmp_path):
    for ahead in (False, True):
        config = make_run(tmp_path, data={"upload_ahead": ahead})
        assert step_settings(config, 2, GPU).prefetch == int(ahead)


def test_read_ahead_features_share_the_memory_of_a_cpu_step_and_not_of_a_gpu_step(tmp_path):
    config = make_run(
        tmp_path, parallel={"retain": 1, "transport": ["ring"], "zero": 1}, batch={"samples": 4, "micro": 1}
    )
    here, gpu = step_settings(config, 2, CPU), step_settings(config, 2, GPU)
    assert (here.prefetch, gpu.prefetch) == (config.data.prefetch, 0)
    assert (here.tensor_cores, gpu.tensor_cores) == (False, True)
    assert here.accumulate
    assert (here.compute_bytes, here.feature_bytes, here.zero_stage) == (4, 2, 1)
    assert (here.retain, here.transports) == (1, ("ring",))


def test_memory_of_a_node_is_shared_by_its_ranks_and_not_by_the_world(monkeypatch):
    join_ranks()
    assert ranks_of_this_machine() == 1
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
        assert ranks_of_this_machine() == 4


def test_one_rank_agrees_with_itself():
    join_ranks()
    require_same({"data": "a"})
