"""The script that measures a GPU runs from end to end on a CPU, and its other ways compute the same step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from csbp.layout import BlockLayout
from csbp.plan import plan_step
from csbp.topology import Grid
from drafter.attention import LayerMask
from drafter.dense import DenseAttention

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def test_the_script_runs_at_small_sizes(tmp_path):
    out = tmp_path / "step.json"
    run = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu_step.py", "--tiny", "--out", out],
        capture_output=True, text=True, timeout=600, check=False,
        env=os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    report = json.loads(out.read_text())
    assert all(row["verdict"] == "ok" for row in report["checks"])
    steps = [row for row in report["steps"] if row["variant"] == "kernels"]
    assert {(row["layers"], row["anchors"]) for row in steps} == {
        (layers, anchors) for layers in ("sliding", "one full layer") for anchors in ("locality", "uniform")
    }
    assert all(row["tokens_per_second"] > 0 and sum(row["parts"].values()) > 0 for row in steps)
    others = {row["variant"] for row in report["steps"] if "ratio" in row}
    assert others == {"dense logits", "flash tiles", "plain modules"}
    assert {row["variant"] for row in report["steps"] if "skipped" in row} == {"FlexAttention"}
    assert "relative norm of the error" in run.stdout


@pytest.mark.parametrize(
    "mask", [LayerMask(None, causal=False), LayerMask(9, causal=True), LayerMask(5, causal=False)]
)
def test_flex_attention_equals_dense_attention(mask, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from gpu_variants import FlexBlockAttention

    anchors, starts = torch.tensor([3, 4, 20, 40]), torch.tensor([0, 0, 0, 30])
    layout = BlockLayout(anchors, starts, 50, 4)
    plan = plan_step(layout, [mask], Grid.single())
    torch.manual_seed(0)
    q, kb, vb = torch.randn(4, 4, 4, 16), torch.randn(4, 4, 2, 16), torch.randn(4, 4, 2, 16)
    k, v = torch.randn(50, 2, 16), torch.randn(50, 2, 16)
    axis = torch.cat([torch.arange(a, b) for a, b in plan.rows])
    found = FlexBlockAttention(plan, (mask,), torch.device("cpu"))(0, q, kb, vb, k[axis], v[axis])
    wanted = DenseAttention(anchors, starts, 50, 4, [mask])(0, q, kb, vb, k, v)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
