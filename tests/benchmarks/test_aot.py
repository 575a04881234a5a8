"""Every kernel compiles for sm_90 without a GPU, spills nothing, and multiplies on the tensor cores."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("aot") / "aot.json"
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks/aot.py", "--heads", "64,128,256", "--json", out],
        capture_output=True, text=True, timeout=800, check=False,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert out.exists(), run.stderr
    return json.loads(out.read_text())["kernels"]


def test_nothing_spills_and_fits_the_chip(compiled):
    assert [row for row in compiled if row["problem"]] == []


def test_attention_multiplies_on_tensor_cores(compiled):
    rows = [row for row in compiled if row["products"] and row["tensor_cores"]]
    assert {row["kernel"] for row in rows} == {
        "forward_kernel", "query_gradient_kernel", "key_gradient_kernel", "own_gradient_kernel",
    }  # fmt: skip
    assert all(row["wgmma"] >= row["products"] and row["mma"] == 0 for row in rows)


def test_all_head_sizes_and_all_kernels_are_there(compiled):
    heads = {row["case"].split(",")[0] for row in compiled if row["tensor_cores"] and row["products"]}
    assert heads == {"head 64", "head 128", "head 256"}
    assert {"convolve_kernel", "norm_kernel", "swiglu_kernel", "statistics_kernel"} <= {
        row["kernel"] for row in compiled
    }
