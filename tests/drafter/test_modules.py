"""Operations with hand-written gradients against their plain versions, in float64."""

import pytest
import torch

from drafter.convolution import GroupedDynamicCausalConv, convolve
from drafter.gather import gathered_dot
from drafter.model import Drafter
from drafter.norm import RMSNorm, _RmsNorm
from drafter.rope import rotate
from tests.drafter import plain
from tests.drafter.tiny import dense_hidden, tiny_config, tiny_drafter, tiny_head


def leaves(*shapes):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def assert_equals_plain(fast, reference, inputs):
    """Values and gradients agree to rounding, and numeric differentiation agrees with the gradient."""
    values, expected = fast(*inputs), reference(*inputs)
    torch.testing.assert_close(values, expected)
    upstream = torch.randn(values.shape, dtype=values.dtype, generator=torch.Generator().manual_seed(4))
    got = torch.autograd.grad(values, inputs, upstream)
    for found, wanted in zip(got, torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(found, wanted)
    assert torch.autograd.gradcheck(fast, inputs)


@pytest.mark.parametrize(("blocks", "rows", "taps"), [(2, 4, 2), (3, 2, 3), (1, 1, 2), (2, 5, 1)])
def test_convolution(blocks, rows, taps):
    inputs = leaves((blocks, rows, 8), (taps, 8), (blocks, rows, taps, 2))
    assert_equals_plain(convolve, plain.convolve, inputs)


def test_convolution_beside_a_residual():
    inputs = leaves((2, 4, 8), (2, 8), (2, 4, 2, 2), (2, 4, 8))
    assert_equals_plain(convolve, lambda x, b, d, rest: rest + plain.convolve(x, b, d), inputs)


def test_convolution_of_no_blocks():
    x, base, delta = leaves((0, 4, 8), (2, 8), (0, 4, 2, 2))
    convolve(x, base, delta).sum().backward()
    assert torch.equal(base.grad, torch.zeros_like(base))


def test_new_convolution_is_the_identity():
    module = GroupedDynamicCausalConv(8, 2, 4)
    rows = torch.randn(2, 3, 8)
    convolved, delta = module.before(rows)
    assert torch.equal(convolved, rows)
    assert torch.equal(module.after(rows, delta, rows), 2 * rows)


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 4, 6), (1, 5)])
def test_rms_norm(shape):
    inputs = leaves(shape, (shape[-1],))
    assert_equals_plain(
        lambda x, w: _RmsNorm.apply(x, w, 1e-3), lambda x, w: plain.rms_norm(x, w, 1e-3), inputs
    )


def test_rms_norm_of_half_precision_rows_takes_statistics_in_float32():
    rows = (torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 100).bfloat16()
    module = RMSNorm(512, 1e-6)
    expected = plain.rms_norm(rows.double(), torch.ones(512, dtype=torch.float64), 1e-6)
    normed = module(rows)
    assert normed.dtype == torch.bfloat16
    # one rounding to eight bits: half a unit in the last place, 2^-9 of the value
    torch.testing.assert_close(normed.double(), expected, rtol=2**-8, atol=0.0)


def test_rotation():
    angles = torch.randn(5, 1, 4, dtype=torch.float64)
    assert_equals_plain(
        lambda x: rotate(x, angles.cos(), angles.sin()),
        lambda x: plain.rotate(x, angles.cos(), angles.sin()),
        leaves((5, 3, 8)),
    )


def test_gathered_dot():
    (rows,) = leaves((600, 6))
    table = torch.randn(11, 6, dtype=torch.float64)
    ids = torch.randint(11, (600, 3))
    got = gathered_dot(rows, table, ids)
    expected = torch.einsum("Rd,Rkd->Rk", rows, table[ids])
    torch.testing.assert_close(got, expected)
    (grad,) = torch.autograd.grad(got.sin().sum(), rows)
    (wanted,) = torch.autograd.grad(expected.sin().sum(), rows)
    torch.testing.assert_close(grad, wanted)


def test_new_dflash2_computes_what_dflash_computes():
    first = tiny_drafter(tiny_config(1))
    second = Drafter(tiny_config(2))
    second.load_state_dict(first.state_dict(), strict=False)
    head, features = tiny_head(), torch.randn(15, first.config.feature_width)
    ids = torch.randint(97, (15,))
    outputs = [dense_hidden(drafter, head, features, [4, 9], ids) for drafter in (first, second)]
    assert torch.equal(*outputs)


def test_whole_drafter_gradients_by_numeric_differentiation():
    """Directional derivative over all parameters at once; float64 central difference, step 1e-6."""
    drafter = tiny_drafter(tiny_config(), dtype=torch.float64)
    head = tiny_head(dtype=torch.float64)
    features = torch.randn(9, drafter.config.feature_width, dtype=torch.float64)
    ids = torch.randint(97, (9,))

    def loss():
        return dense_hidden(drafter, head, features, [3, 6], ids).sin().sum()

    backbone = [p for name, p in drafter.named_parameters() if not name.startswith("candidate_selector")]
    gradients = torch.autograd.grad(loss(), backbone)
    directions = [torch.randn_like(p) for p in backbone]
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    values = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            for p, d in zip(backbone, directions, strict=True):
                p.add_(d, alpha=step)
            values.append(loss())
            for p, d in zip(backbone, directions, strict=True):
                p.add_(d, alpha=-step)
    torch.testing.assert_close((values[0] - values[1]) / 2e-6, slope, rtol=1e-5, atol=1e-5)


def test_drafter_without_blocks_or_context_runs_and_gives_zero_gradients():
    drafter, head = tiny_drafter(tiny_config()), tiny_head()
    features = torch.randn(7, drafter.config.feature_width)
    nothing = torch.zeros(0, dtype=torch.int64)
    dense_hidden(drafter, head, features, nothing, torch.zeros(7, dtype=torch.int64)).sum().backward()
    assert float(drafter.layers[0].mlp.up_proj.weight.grad.abs().max()) == 0.0
    alone = dense_hidden(drafter, head, features[:0], [0], torch.tensor([5]))
    assert torch.isfinite(alone).all()
