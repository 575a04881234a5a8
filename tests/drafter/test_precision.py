"""`precision: bf16`: which numbers are rounded, on a CPU and on a GPU."""

import pytest
import torch

from drafter.precision import compute_dtype, cpu_products


@pytest.fixture
def bf16_products():
    with cpu_products("bf16"):
        yield


def test_rows_are_narrow_on_a_gpu_only():
    assert compute_dtype("bf16", torch.device("cuda")) == torch.bfloat16
    assert compute_dtype("bf16", torch.device("cpu")) == torch.float32
    assert compute_dtype("fp32", torch.device("cuda")) == torch.float32


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 products"
)
def test_a_cpu_rounds_operands_and_nothing_else(bf16_products):
    rows, weight = torch.randn(64, 512), torch.randn(512, 300)
    rounded = rows.bfloat16().double() @ weight.bfloat16().double()
    found = (rows @ weight).double()
    # sums of 512 float32 terms; a result in bfloat16 would be 0.4 % off
    assert (found - rounded).norm() / rounded.norm() < 1e-6
    assert (found - rows.double() @ weight.double()).norm() / rounded.norm() > 1e-3


def test_attention_can_ask_for_full_precision(bf16_products):
    rows, weight = torch.randn(64, 512), torch.randn(512, 300)
    exact = rows.double() @ weight.double()
    with cpu_products("fp32"):
        found = rows @ weight
    assert (found.double() - exact).norm() / exact.norm() < 1e-6
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"


def test_float32_products_are_exact_again_after_a_bf16_run():
    with cpu_products("bf16"):
        pass
    rows, weight = torch.randn(64, 512), torch.randn(512, 300)
    exact = rows.double() @ weight.double()
    assert ((rows @ weight).double() - exact).norm() / exact.norm() < 1e-6
