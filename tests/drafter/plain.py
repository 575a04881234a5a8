"""Plain versions of what the package computes with hand-written gradients: the specification of each."""

import torch


def convolve(x, base, delta):
    """y[j, ch] = sum_o (base[o, ch] + delta[j, o, group(ch)]) * x[j - o, ch], written as loops over taps."""
    group_size = x.shape[-1] // delta.shape[-1]
    rows = []
    for j in range(x.shape[1]):
        total = torch.zeros_like(x[:, 0])
        for o in range(base.shape[0]):
            if j >= o:
                coefficients = base[o] + delta[:, j, o].repeat_interleave(group_size, -1)
                total = total + coefficients * x[:, j - o]
        rows.append(total)
    return torch.stack(rows, 1)


def rms_norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
