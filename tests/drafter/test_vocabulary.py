"""Tiled loss and top-k against their dense float64 specification."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drafter.frozen import FrozenHead
from drafter.precision import cpu_products
from drafter.vocabulary import (
    LogitScale,
    all_logits,
    candidate_logits,
    cross_entropy,
    full_vocabulary,
    largest,
    sampled_vocabulary,
    top_k,
)

SCALES = [LogitScale(), LogitScale(0.3), LogitScale(0.7, 5.0)]


def problem(rows=13, vocabulary=57, width=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(vocabulary, width, generator=generator, dtype=dtype)
    hidden = torch.randn(rows, width, generator=generator, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, (rows,), generator=generator)
    return hidden, FrozenHead(head, head), labels


def dense_cross_entropy(hidden, head, labels, scale):
    """The specification: all logits at once."""
    logits = hidden @ head.T * scale.multiplier
    if scale.softcap is not None:
        logits = scale.softcap * torch.tanh(logits / scale.softcap)
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none"), logits


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("tiles", [(4, 10), (13, 57), (100, 1000), (1, 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_loss_and_gradient_equal_the_dense_twin(scale, tiles, dtype, tolerance):
    hidden, head, labels = problem(dtype=dtype)
    weights = torch.linspace(0.1, 2.0, len(labels), dtype=torch.float64)
    ce, best = cross_entropy(
        hidden, full_vocabulary(labels, head), scale, row_tile=tiles[0], vocabulary_tile=tiles[1]
    )
    (ce.double() * weights).sum().backward()
    reference = hidden.detach().double().requires_grad_()
    expected, logits = dense_cross_entropy(reference, head.head.double(), labels, scale)
    (expected * weights).sum().backward()
    torch.testing.assert_close(ce.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(hidden.grad.double(), reference.grad, rtol=tolerance, atol=tolerance)
    assert torch.equal(best, logits.argmax(1) == labels)


@pytest.mark.parametrize("scale", SCALES)
def test_gradcheck(scale):
    hidden, head, labels = problem(rows=5)

    def loss(rows):
        ce, _ = cross_entropy(rows, full_vocabulary(labels, head), scale, row_tile=2, vocabulary_tile=10)
        return 1 - torch.exp(-ce) + ce.sin()

    assert torch.autograd.gradcheck(loss, (hidden,))


def test_large_logits_do_not_overflow():
    hidden, head, labels = problem(dtype=torch.float32)
    ce, _ = cross_entropy(hidden * 1e4, full_vocabulary(labels, head), LogitScale(), vocabulary_tile=7)
    expected, _ = dense_cross_entropy(hidden.double() * 1e4, head.head.double(), labels, LogitScale())
    torch.testing.assert_close(ce.double(), expected, rtol=1e-5, atol=0.05)


def test_half_precision_tables_are_summed_in_float32():
    hidden, head, labels = problem(rows=40, vocabulary=3000, dtype=torch.float32)
    half = FrozenHead(head.embedding.bfloat16(), head.head.bfloat16())
    rows = hidden.detach().bfloat16().requires_grad_()
    ce, _ = cross_entropy(rows, full_vocabulary(labels, half), LogitScale(), vocabulary_tile=100)
    expected, _ = dense_cross_entropy(rows.detach().double(), half.head.double(), labels, LogitScale())
    assert ce.dtype == torch.float32
    torch.testing.assert_close(ce.double(), expected, rtol=1e-5, atol=1e-5)
    ce.sum().backward()
    assert rows.grad.dtype == torch.bfloat16


def test_no_rows_give_no_loss_and_a_zero_gradient():
    hidden, head, _ = problem()
    ce, _ = cross_entropy(hidden[:0], full_vocabulary(torch.zeros(0, dtype=torch.int64), head), LogitScale())
    ce.sum().backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


class LargestResult(TorchDispatchMode):
    """Records the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor._base is None and not func.is_view:
                self.numel = max(self.numel, tensor.numel())
        return result


def test_no_tensor_exceeds_the_tile():
    hidden, head, labels = problem(rows=64, vocabulary=4096, dtype=torch.float32)
    with LargestResult() as largest:
        ce, _ = cross_entropy(
            hidden, full_vocabulary(labels, head), LogitScale(1.0, 30.0), row_tile=16, vocabulary_tile=128
        )
        ce.sum().backward()
        top_k(hidden, head, 16, row_tile=16, vocabulary_tile=128)
    assert largest.numel <= 16 * 128


@pytest.mark.parametrize("tiles", [(4, 10), (100, 1000), (3, 2)])
def test_top_k_is_exact_over_the_whole_vocabulary(tiles):
    hidden, head, _ = problem()
    ids = top_k(hidden, head, 6, row_tile=tiles[0], vocabulary_tile=tiles[1])
    assert torch.equal(ids, (hidden @ head.head.T).topk(6, 1).indices)


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 products"
)
def test_top_k_by_rounded_products_is_ordered_by_exact_ones():
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 64, generator=draw)
    table = torch.randn(3000, 64, generator=draw)
    head = FrozenHead(table, table)
    exact = (hidden @ table.T).topk(8, 1).indices
    with cpu_products("bf16"):
        found = top_k(hidden, head, 8, row_tile=16, vocabulary_tile=500)
    assert torch.equal(found, exact)
    assert head.narrow_head.dtype == torch.bfloat16


@pytest.mark.parametrize("k", [1, 3, 16])
@pytest.mark.parametrize("width", [1, 15, 17, 255, 256, 257, 1000, 4099])
@pytest.mark.parametrize("order", ["random", "ascending", "descending"])
def test_largest_equals_topk(k, width, order):
    values = torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    if order != "random":
        values = values.sort(dim=1, descending=order == "descending").values
    found, columns = largest(values, k)
    expected = values.topk(min(k, width), dim=1)
    assert torch.equal(found, expected.values)
    assert torch.equal(columns, expected.indices)


def test_largest_of_ties_are_distinct_columns_with_the_right_values():
    values = torch.randint(4, (6, 5000), generator=torch.Generator().manual_seed(0)).float()
    found, columns = largest(values, 16)
    assert torch.equal(found, values.topk(16).values)
    assert torch.equal(found, values.gather(1, columns))
    assert all(len(set(row)) == 16 for row in columns.tolist())


def test_largest_of_no_rows_is_empty():
    assert [t.shape for t in largest(torch.empty(0, 5000), 16)] == [(0, 16)] * 2


def test_drafting_takes_the_heads_own_product():
    hidden, head, _ = problem(rows=7, vocabulary=3000)
    seen = []

    def product(rows):
        seen.append(len(rows))
        return rows @ head.head.T

    faster = FrozenHead(head.embedding, head.head, product=product)
    assert torch.equal(top_k(hidden, faster, 16), top_k(hidden, head, 16))
    scale = LogitScale(0.7, 5.0)
    torch.testing.assert_close(all_logits(hidden, faster, scale), all_logits(hidden, head, scale))
    assert seen == [7, 7]
    assert faster.to(dtype=torch.float32).product is None


def test_candidate_logits_and_their_gradient_equal_dense_gathers():
    hidden, head, _ = problem(rows=300)
    scale = LogitScale(0.7, 5.0)
    ids = top_k(hidden, head, 4)
    weights = torch.randn(300, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits = candidate_logits(hidden, head, ids, scale)
    (logits * weights).sum().backward()
    reference = hidden.detach().requires_grad_()
    _, dense = dense_cross_entropy(reference, head.head, torch.zeros(300, dtype=torch.int64), scale)
    (dense.gather(1, ids) * weights).sum().backward()
    torch.testing.assert_close(logits, dense.gather(1, ids))
    torch.testing.assert_close(hidden.grad, reference.grad)


def test_sampled_vocabulary_holds_labels_and_frequent_tokens_and_weighs_the_rest():
    _, head, labels = problem(vocabulary=1000)
    head.frequent_ids = torch.tensor([7, 8, 9, 10, 11, 12])
    vocabulary = sampled_vocabulary(labels, head, 104, torch.Generator().manual_seed(0))
    assert torch.equal(vocabulary.table[vocabulary.gold], head.head[labels])
    certain = torch.unique(torch.cat((labels, head.frequent_ids)))
    drawn = len(vocabulary.table) - len(certain)
    assert drawn == 104 - 6
    heavy = vocabulary.log_weights[vocabulary.log_weights > 0]
    assert len(heavy) == drawn
    torch.testing.assert_close(heavy, torch.full_like(heavy, math.log((1000 - len(certain)) / drawn)))


def test_sampled_partition_sum_is_unbiased():
    """Mean of 400 sampled partition sums within 4 standard errors of the full one."""
    hidden, head, labels = problem(rows=3, vocabulary=500)
    hidden = hidden.detach()
    _, logits = dense_cross_entropy(hidden, head.head, labels, LogitScale())
    full = logits.logsumexp(1).exp()
    generator = torch.Generator().manual_seed(0)
    gold = logits.gather(1, labels[:, None])[:, 0]
    sums = []
    for _ in range(400):
        ce, _ = cross_entropy(hidden, sampled_vocabulary(labels, head, 50, generator), LogitScale())
        sums.append((ce + gold).exp())
    sums = torch.stack(sums)
    error = sums.std(0) / len(sums) ** 0.5
    assert ((sums.mean(0) - full).abs() < 4 * error).all()


def test_sample_as_large_as_the_vocabulary_is_exact():
    hidden, head, labels = problem()
    ce, _ = cross_entropy(hidden, sampled_vocabulary(labels, head, 57), LogitScale())
    expected, _ = dense_cross_entropy(hidden, head.head, labels, LogitScale())
    torch.testing.assert_close(ce, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_half_precision_products_on_a_gpu_accumulate_in_float32():
    hidden, head, labels = problem(rows=64, vocabulary=4096, width=64, dtype=torch.float32)
    half = FrozenHead(head.embedding.bfloat16(), head.head.bfloat16()).to("cuda")
    rows = hidden.detach().bfloat16().cuda().requires_grad_()
    ce, _ = cross_entropy(rows, full_vocabulary(labels.cuda(), half), LogitScale(), vocabulary_tile=512)
    expected, _ = dense_cross_entropy(rows.detach().double(), half.head.double(), labels.cuda(), LogitScale())
    torch.testing.assert_close(ce.double(), expected, rtol=1e-4, atol=1e-4)
