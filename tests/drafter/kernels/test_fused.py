"""The drafter's kernels, run by Triton's interpreter in float32, against their plain twins."""

import pytest
import torch
from torch.nn import functional as F

from drafter.convolution import convolve
from drafter.dense import DenseAttention
from drafter.frozen import FrozenHead, LogitScale, embed_blocks
from drafter.kernels import mode
from drafter.norm import _RmsNorm
from drafter.vocabulary import Vocabulary, cross_entropy, full_vocabulary, top_k
from tests.drafter.tiny import tiny_config, tiny_drafter, tiny_head


def close(found, wanted):
    # float32 sums of at most a few hundred terms of size 1, in another order
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("blocks", "block", "taps", "groups", "size"), [(5, 4, 2, 3, 16), (3, 1, 2, 20, 4), (9, 8, 3, 17, 16)]
)
@pytest.mark.parametrize("residual", [False, True])
def test_convolution(kernels, blocks, block, taps, groups, size, residual):
    torch.manual_seed(0)
    x = torch.randn(blocks, block, groups * size, requires_grad=True)
    base = torch.randn(taps, groups * size, requires_grad=True)
    delta = torch.randn(blocks, block, taps, groups, requires_grad=True)
    rest = torch.randn_like(x) if residual else None
    wanted = convolve(x, base, delta) + (rest if residual else 0)
    dy = torch.randn_like(wanted)
    grads = torch.autograd.grad(wanted, (x, base, delta), dy)
    found = kernels["convolution"].convolve(x.detach(), base.detach(), delta.detach(), rest, torch.float32)
    close(found, wanted)
    for a, b in zip(
        kernels["convolution"].convolve_gradients(dy, x.detach(), base.detach(), delta.detach()),
        grads,
        strict=True,
    ):
        close(a, b)


@pytest.mark.parametrize("shape", [(3, 5, 24), (1, 64), (70, 3, 128), (2, 5120)])
def test_norm(kernels, shape):
    torch.manual_seed(0)
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    wanted = _RmsNorm.apply(x, weight, 1e-6)
    dy = torch.randn_like(wanted)
    grads = torch.autograd.grad(wanted, (x, weight), dy)
    y, inverse = kernels["norm"].norm(x.detach(), weight.detach(), 1e-6)
    close(y, wanted)
    for a, b in zip(
        kernels["norm"].norm_gradients(dy, x.detach(), weight.detach(), inverse), grads, strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # sums of 210 or 5,120 products


def test_swiglu(kernels):
    torch.manual_seed(0)
    gate, up = (torch.randn(7, 400, requires_grad=True) for _ in range(2))
    wanted = F.silu(gate) * up
    dout = torch.randn_like(wanted)
    grads = torch.autograd.grad(wanted, (gate, up), dout)
    close(kernels["swiglu"].swiglu(gate.detach(), up.detach()), wanted)
    for a, b in zip(kernels["swiglu"].swiglu_gradients(dout, gate.detach(), up.detach()), grads, strict=True):
        close(a, b)


@pytest.mark.parametrize("scale", [LogitScale(), LogitScale(0.7, 5.0)], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_gradient_and_candidates(kernels, scale, weighted):
    torch.manual_seed(0)
    rows, tokens, width, k = 150, 1000, 24, 5  # two chunks, and a last segment of 40 columns
    hidden = torch.randn(rows, width, requires_grad=True)
    head = FrozenHead(table := torch.randn(tokens, width), table)
    gold = torch.randint(tokens, (rows,))
    gold[:3] = torch.tensor([0, tokens - 1, 960])
    log_weights = torch.randn(tokens).abs() if weighted else None
    ce, best = cross_entropy(hidden, Vocabulary(table, gold, log_weights), scale)
    (gradient,) = torch.autograd.grad(ce.sum(), hidden)
    found = kernels["vocabulary"].score(
        hidden.detach(), table, gold, log_weights, scale.multiplier, scale.softcap,
        k=k, differentiable=True, chunk_bytes=128 * tokens * 8,
    )  # fmt: skip
    close(found.ce, ce)
    assert torch.equal(found.best, best)
    torch.testing.assert_close(found.gradient, gradient, rtol=1e-4, atol=2e-5)
    assert torch.equal(found.candidates, top_k(hidden.detach(), head, k))


def test_a_nearly_certain_label_keeps_its_gradient(kernels):
    # p = 1 - 2e-5: the gradient is what the other tokens take away, not a difference of rounded ones
    table = torch.eye(8)
    hidden = torch.zeros(1, 8, dtype=torch.float64)
    hidden[0, 3] = 13.0
    gold = torch.tensor([3])
    leaf = hidden.clone().requires_grad_()
    ce, _ = cross_entropy(
        leaf, full_vocabulary(gold, FrozenHead(table.double(), table.double())), LogitScale()
    )
    (wanted,) = torch.autograd.grad(ce.sum(), leaf)
    found = kernels["vocabulary"].score(
        hidden.float(), table, gold, None, 1.0, None, k=0, differentiable=True
    )
    torch.testing.assert_close(found.gradient.double(), wanted, rtol=1e-2, atol=0)


def test_chunks_are_equal_and_bounded(kernels):
    chunk_rows = kernels["vocabulary"].chunk_rows
    assert chunk_rows(14336, 248320, 2) == 1792  # 8 chunks, of 1,801 rows at most
    assert chunk_rows(100, 248320, 2) == 128
    assert chunk_rows(1, 10**9, 2) == 128
    assert chunk_rows(0, 100, 4) == 1


def test_a_drafter_on_its_kernels_is_the_plain_one(kernels, monkeypatch):
    """Norms, gates and convolutions with the residual stream, forward and backward, in place in the model."""
    config = tiny_config(2)
    drafter, head = tiny_drafter(config), tiny_head()
    features = torch.randn(20, config.feature_width, generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([6, 13, 20])

    def run(name):
        attention = DenseAttention(
            anchors, torch.zeros_like(anchors), len(features), config.block_size, config.layer_masks
        )
        with mode(name):
            hidden = drafter(
                drafter.fuse(features),
                torch.arange(len(features)),
                embed_blocks(head, config, anchors),
                anchors[:, None] + torch.arange(config.block_size),
                attention,
            )
            return hidden, torch.autograd.grad(hidden.square().mean(), used)

    used = [p for n, p in drafter.named_parameters() if not n.startswith("candidate_selector")]
    wanted, wanted_gradients = run("never")
    calls = counted(monkeypatch, kernels["swiglu"], "swiglu")
    found, gradients = run("always")
    assert len(calls) == config.num_hidden_layers
    close(found, wanted)
    for a, b in zip(gradients, wanted_gradients, strict=True):
        close(a, b)


def counted(monkeypatch, module, name):
    calls, function = [], getattr(module, name)

    def spy(*args):
        calls.append(name)
        return function(*args)

    monkeypatch.setattr(module, name, spy)
    return calls
