"""Kernels beside their plain twins in float64, and their speed: a part of `benchmarks/gpu_step.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from csbp.attention import TORCH, Backend, OwnBlock, SoftmaxState, Upstream, own_block_mask
from csbp.backends import load_backend
from csbp.tiles import KeyRanges
from drafter.attention import LayerMask
from drafter.convolution import convolve
from drafter.frozen import FrozenHead, LogitScale
from drafter.norm import RMSNorm
from drafter.vocabulary import cross_entropy_with_candidates, full_vocabulary, top_k

BOUND = {
    torch.bfloat16: 2e-2,
    torch.float32: 1e-5,
}  # of a relative norm: bf16 products lie between 1e-3 and 1e-2


def relative(found: Tensor, wanted: Tensor) -> float:
    """Norm of the error over the norm of what is wanted."""
    found, wanted = found.detach(), wanted.detach()
    scale = wanted.double().norm()
    return float((found.double() - wanted.double()).norm() / (scale if scale > 0 else 1.0))


def row(kernel: str, case: str, error: float, bound: float) -> dict[str, Any]:
    return {"kernel": kernel, "case": case, "error": error, "verdict": "ok" if error < bound else "WRONG"}


def check_kernels(device: torch.device, *, tiny: bool) -> list[dict[str, Any]]:
    """Relative norms of all kernels' errors. On a CPU it is the plain twins in float32 that are checked."""
    dtype = torch.float32 if tiny else torch.bfloat16
    torch.manual_seed(1)
    found: list[dict[str, Any]] = []
    for head in (16,) if tiny else (64, 128, 256):
        for seen, window in (("window", 24 if tiny else 512), ("full", None)):
            case = f"head {head}, {seen}"
            for name in ("torch" if tiny else "triton", "flash"):
                errors = attention_errors(device, head, window, dtype, load_backend(name))
                found += [row(k, f"{case}, {name}", e, BOUND[dtype]) for k, e in errors]
    found += [row(k, c, e, BOUND[dtype]) for k, c, e in module_errors(device, dtype, tiny=tiny)]
    return found


def attention_case(
    device: torch.device, head: int, window: int | None, dtype: torch.dtype, blocks: int, context: int
) -> tuple[Tensor, OwnBlock, Tensor, Tensor, KeyRanges, Tensor]:
    """Queries, own blocks, context and ranges of random anchors, and an output gradient."""
    block, groups, sharing = 8, 2, 4
    anchors = torch.randint(1, context, (blocks,)).sort().values
    hi = anchors
    slots = anchors[:, None] + torch.arange(block)
    lo = torch.zeros_like(slots) if window is None else (slots - window + 1).clamp(min=0)
    lo = torch.minimum(lo, hi[:, None])
    ranges = KeyRanges(lo, hi).to(device)
    q, do = (torch.randn(groups, blocks * block * sharing, head, device=device).to(dtype) for _ in range(2))
    own_k, own_v = (torch.randn(blocks, block, groups, head, device=device).to(dtype) for _ in range(2))
    k, v = (torch.randn(context, groups, head, device=device).to(dtype) for _ in range(2))
    mask = own_block_mask(LayerMask(window, causal=False), block, device)
    return q, OwnBlock(own_k, own_v, mask), k, v, ranges, do


def attention_errors(
    device: torch.device, head: int, window: int | None, dtype: torch.dtype, backend: Backend
) -> Iterator[tuple[str, float]]:
    """Output and gradients of one call, with the context in one part and in two."""
    blocks, context = (6, 60) if device.type == "cpu" else (61, 3001)
    q, own, k, v, ranges, do = attention_case(device, head, window, dtype, blocks, context)
    wide = OwnBlock(own.k.double(), own.v.double(), own.mask)
    state = TORCH.begin(q.double(), wide, k.double(), v.double(), ranges)
    out, lse = state.finish()
    upstream = Upstream(do.double(), (do.double() * out).sum(-1), lse)
    dq = torch.zeros_like(out)
    wanted = (out, dq, *TORCH.begin_backward(dq, q.double(), upstream, wide, k.double(), v.double(), ranges))

    def run(parts: list[tuple[Tensor, Tensor, KeyRanges]]) -> list[Tensor]:
        state = backend.begin(q, own, *parts[0])
        for part in parts[1:]:
            backend.forward(state, q, *part)
        out, lse = state.finish()
        upstream = Upstream(do, (do * out).sum(-1), lse)
        dq = torch.zeros_like(out)
        *of_own, dk, dv = backend.begin_backward(dq, q, upstream, own, *parts[0])
        of_parts = [(dk, dv), *(backend.backward(dq, q, upstream, *part) for part in parts[1:])]
        return [out, dq, *of_own, *(torch.cat(pieces) for pieces in zip(*of_parts, strict=True))]

    cut = context // 3
    lo, hi = ranges.on_host
    halves = [
        (k[:cut], v[:cut], KeyRanges(lo.clamp(max=cut), hi.clamp(max=cut)).to(device)),
        (k[cut:], v[cut:], KeyRanges((lo - cut).clamp(min=0), (hi - cut).clamp(min=0)).to(device)),
    ]
    names = ("output", "dq", "dk own", "dv own", "dk", "dv")
    for label, parts in (("", [(k, v, ranges)]), (", two parts", halves)):
        for name, a, b in zip(names, run(parts), wanted, strict=True):
            yield f"attention {name}{label}", relative(a, b)


def module_errors(
    device: torch.device, dtype: torch.dtype, *, tiny: bool
) -> Iterator[tuple[str, str, float]]:
    """Norm, convolution, SwiGLU's product and the loss, each with its gradients."""
    blocks, width, tokens = (6, 64, 300) if tiny else (100, 5120, 40_000)
    x = torch.randn(blocks, 8, width, device=device).to(dtype)
    dy = torch.randn_like(x)
    norm = RMSNorm(width, 1e-6).to(device)
    for name, a, b in against_double(norm, [x], dy, [norm.weight]):
        yield "norm", name, relative(a, b)
    base = torch.randn(2, width, device=device)
    delta = torch.randn(blocks, 8, 2, width // 16, device=device).to(dtype)
    for name, a, b in against_double(convolve, [x, base, delta], dy, []):
        yield "convolution", name, relative(a, b)
    table = torch.randn(tokens, width, device=device).mul_(width**-0.5).to(dtype)
    head, labels = FrozenHead(table, table), torch.randint(tokens, (blocks * 8,), device=device)
    rows = x.flatten(0, 1).float().requires_grad_()
    ce, _, ids = cross_entropy_with_candidates(rows, full_vocabulary(labels, head), LogitScale(), 16)
    (gradient,) = torch.autograd.grad(ce.sum(), rows)
    exact = x.flatten(0, 1).double().requires_grad_()
    wanted = F.cross_entropy(exact @ table.double().T, labels, reduction="none")
    yield "cross entropy", "value", relative(ce, wanted)
    yield "cross entropy", "gradient", relative(gradient, torch.autograd.grad(wanted.sum(), exact)[0])
    if ids is None:
        ids = top_k(rows.detach(), head, 16)
    logits = exact.detach() @ table.double().T
    yield "top-k", "logits of 16 candidates", relative(logits.gather(1, ids), logits.topk(16, dim=1).values)


def against_double(
    work: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor, parameters: list[Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Output and gradients of `work` as it runs, beside itself on float64 inputs."""
    results = []
    for wide in (False, True):
        leaves = [(x.double() if wide else x).detach().requires_grad_() for x in inputs]
        out = work(*leaves)
        results.append([out, *torch.autograd.grad(out, [*leaves, *parameters], dy.to(out.dtype))])
    names = ["output", *(f"gradient {i}" for i in range(len(inputs) + len(parameters)))]
    yield from zip(names, *results, strict=True)


def attention_speed(
    device: torch.device, peak_tflops: float, median_seconds: Callable[..., float]
) -> list[dict[str, Any]]:
    """The kernels at the shape of the 27B drafter: 2,048 blocks of 8, 32 query and 8 key heads of 128."""
    from csbp.kernels import launch

    blocks, block, groups, sharing, head, window = 2048, 8, 8, 4, 128, 2048
    found = []
    for case, spacing, wide in (("neighbours", 8, False), ("512 apart", 512, False), ("64K, full", 32, True)):
        slots = torch.arange(blocks)[:, None] * spacing + torch.arange(block) + window
        lo = torch.zeros_like(slots) if wide else slots - window + 1
        ranges = KeyRanges(lo, slots[:, 0].contiguous()).to(device)
        keys = int(slots[-1, 0])
        q = torch.randn(groups, blocks * block * sharing, head, device=device, dtype=torch.bfloat16)
        k, v = (torch.randn(keys, groups, head, device=device, dtype=torch.bfloat16) for _ in range(2))
        state = SoftmaxState.empty(q)
        upstream = Upstream(torch.randn_like(q), torch.zeros_like(state.max), torch.full_like(state.max, 8.0))
        dq, (dk, dv) = torch.zeros_like(state.numerator), (torch.empty(k.shape, device=device) for _ in "kv")
        pairs = float((slots[:, :1] - lo).sum()) * groups * sharing
        for name, products, made in (
            ("forward", 2, launch.forward_launch(state, q, k, v, ranges, None)),
            ("query gradient", 3, launch.query_gradient_launches(dq, q, upstream, k, v, ranges, None)[0]),
            ("key gradient", 4, launch.key_gradient_launch(dk, dv, q, upstream, k, v, ranges)),
        ):
            tflops = 2 * products * pairs * head / median_seconds(made.run, device) / 1e12
            found.append({"kernel": name, "case": case, "tflops": tflops, "share": tflops / peak_tflops})
    return found
