"""`plan` and `bench device`: options to a plan, refusals, tables and JSON."""

from __future__ import annotations

import io
import json

import pytest
from pydantic import ValidationError
from rich.console import Console

from csbp.cost import ShapeError, Workload
from csbp.device import device_constants
from csbp.footprint import StepSettings
from csbp.planner import PlanError
from drafter.config import DrafterConfig
from pipelines.bench_device import BenchDeviceOptions, render_bench_device, run_bench_device
from pipelines.plan import (
    SHAPES,
    PlanOptions,
    auto_context_ranks,
    drafter_shape,
    named_shape,
    render_plan,
    run_plan,
    this_device,
)

QWEN = "qwen3.8-27b-dflash2"


def options(**changes):
    return PlanOptions.model_validate({"target": QWEN, "context": 16384, "gpus": 4, "anchors": 64, **changes})


def printed(renderable) -> str:
    console = Console(width=240, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


def tiny_target(**changes):
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 500,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        **changes,
    }


@pytest.mark.parametrize(
    ("name", "parameters"), [(QWEN, 1_924_404_480), ("muse-glimmer-30b-dflash2", 2_772_159_744)]
)
def test_shipped_shapes_are_the_released_drafters(name, parameters):
    """The first count is published; the second follows from the published sizes by the same sum."""
    assert named_shape(name).parameter_count == parameters
    config = DrafterConfig.from_dict(json.loads((SHAPES / f"{name}.json").read_text()))
    assert config.layer_types == ("sliding_attention",) * 5
    assert (config.sliding_window, config.is_causal) == (2048, False)


def test_the_published_neighbourhood_needs_no_context_ranks():
    """At a million tokens 2,048 blocks of one neighbourhood read 18 thousand rows: 8 replicas fit."""
    report = run_plan(options(context=1 << 20, gpus=8, anchors=2048, anchor_rule="locality", gpu_memory=80))
    assert report.plan.chosen.context_ranks == 1
    assert report.plan.chosen.feature_rows == 2047 * 8 + 2047


def test_uniform_anchors_at_a_million_tokens_need_context_ranks():
    report = run_plan(options(context=1 << 20, gpus=8, anchors=2048, gpu_memory=80))
    assert report.plan.chosen.context_ranks > 1
    assert report.plan.chosen.fits


def test_a_run_that_cannot_fit_is_refused_with_what_would():
    """Before anything is allocated: bytes of a rank, and the smallest change that fits."""
    with pytest.raises(PlanError, match=r"GiB of memory a rank, or with \d+ ranks") as refused:
        run_plan(options(context=1 << 20, gpus=1, gpu_memory=48, window=0, anchors=512))
    assert "P = 1 is" in str(refused.value)


def test_tables_show_every_divisor_and_the_assumption():
    text = printed(render_plan(run_plan(options(anchors=2048))))
    assert "1,924,404,480 parameters" in text
    for part in (
        "weights",
        "optimizer state",
        "block activations",
        "block layers",
        "head",
        "gradient reduction",
    ):
        assert part in text
    assert "P = 1" in text
    assert "P = 4" in text
    assert "assumed reached" in text
    assert "--parallel.context_ranks" in text


def test_plan_is_json():
    content = json.loads(json.dumps(run_plan(options()).to_dict()))
    assert [candidate["context_ranks"] for candidate in content["candidates"]] == [1, 2, 4]
    assert content["chosen"]["fits"]
    assert {"verdict", "peak_gib", "fleet_tokens_per_second", "transports"} <= set(content["candidates"][0])


def test_a_target_gives_its_default_drafter(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_target()))
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        shape = named_shape(name)
        assert (shape.hidden, shape.layers, shape.feature_width) == (64, 5, 5 * 64)
        assert shape.tied_head
    assert run_plan(options(target=str(tmp_path), context=2048)).plan.chosen.fits


def test_nested_text_config_of_a_multimodal_target(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": tiny_target()}))
    assert named_shape(str(tmp_path)).vocabulary == 500


def test_options_change_the_drafter():
    shape = run_plan(options(layers=3, window=0, taps=2, block_size=16)).question.shape
    assert shape.layers == 3
    assert all(mask.window is None for mask in shape.masks)
    assert shape.feature_width == 2 * 5120
    assert shape.block_size == 16
    mixed = run_plan(options(full_layers=1)).question.shape
    assert [mask.window for mask in mixed.masks] == [2048] * 4 + [None]
    assert run_plan(options(layers=7)).question.shape.layers == 7


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_files_that_are_no_config_are_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(PlanError, match=r"config\.json"):
        named_shape(str(path))


def test_unknown_names_list_the_shipped_shapes():
    with pytest.raises(PlanError, match=QWEN):
        named_shape("no-such-drafter")


def test_options_are_checked():
    with pytest.raises(ValidationError):
        options(gpus=0)
    with pytest.raises(ValidationError):
        options(contexts=5)
    with pytest.raises(ShapeError, match="lower anchors"):
        run_plan(options(context=32, anchors=64))


def test_auto_takes_one_rank_where_all_fits_and_more_where_it_does_not(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_target()))
    shape = drafter_shape(DrafterConfig.for_target(tiny_target(), mask_token_id=499))
    settings = StepSettings(compute_bytes=4, feature_bytes=4)
    assert auto_context_ranks(shape, Workload(512, 16), settings, 2, this_device(2)) == 1
    with pytest.raises(PlanError, match="smallest over P"):
        auto_context_ranks(named_shape(QWEN), Workload(1 << 18, 4096), settings, 2, this_device(2))


def test_this_machine_has_memory():
    assert this_device(1).memory_bytes > 2 * this_device(4).memory_bytes > 0


def test_bench_device_measures_and_plans_with_the_result(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_target()))
    out = tmp_path / "device.json"
    asked = {"target": str(tmp_path), "rows": 16, "link": False, "device": "cpu", "out": str(out)}
    result = run_bench_device(BenchDeviceOptions.model_validate(asked))
    assert device_constants(str(out)) == result.constants
    assert json.loads(json.dumps(result.to_dict()))["matmul_flops"] > 0
    assert "GFLOP/s" in printed(render_bench_device(result))
    report = run_plan(options(target=str(tmp_path), context=2048, device=str(out)))
    assert report.plan.chosen.step_seconds > 0
