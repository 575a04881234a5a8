"""Compile every kernel for sm_90, without a GPU, and say what the compiler made of it.

    PYTHONPATH=. python benchmarks/aot.py [--heads 64,128,256] [--json FILE]

Kernels, tiles and arguments are those that the launchers choose. Printed for each: registers of a thread,
bytes of shared memory, bytes of a thread's stack (spills), how many matrix products the kernel has, and how
many `wgmma` and older `mma` instructions they became. The exit code is 1 if anything spills, or if a product
of half precision does not run on `wgmma`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from csbp.attention import OwnBlock, SoftmaxState, Upstream
from csbp.kernels import launch
from csbp.tiles import KeyRanges
from drafter.kernels import convolution, norm, swiglu, vocabulary
from drafter.kernels.launch import Launch

TARGET = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 227 * 1024  # of a program on sm_90
OBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class _NoDevice:
    """Stands in for the driver: kernels are compiled for `TARGET` and never started."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


@dataclass(frozen=True)
class Compiled:
    """Attributes:
    kernel: its name.
    case: what was compiled.
    registers, stack, shared: of a thread, of a thread, of a program; the last two in bytes.
    products: matrix products of the kernel.
    wgmma, mma: instructions.
    tensor_cores: products have to run on wgmma.
    """

    kernel: str
    case: str
    registers: int
    stack: int
    shared: int
    products: int
    wgmma: int
    mma: int
    tensor_cores: bool

    @property
    def problem(self) -> str:
        if self.stack:
            return f"spills {self.stack} bytes a thread"
        if self.shared > SHARED_LIMIT:
            return f"needs {self.shared} bytes of shared memory"
        if self.tensor_cores and self.products and (self.mma or self.wgmma < self.products):
            return "a product is not a wgmma"
        return ""


def compile_launch(made: Launch, case: str, *, tensor_cores: bool = True) -> Compiled:
    """Compile what `made`, a `Launch`, would start."""
    binary = made.compile()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [OBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"{OBJDUMP} did not tell the registers of {made.kernel.__name__}: {usage}")
    ptx = binary.asm["ptx"]
    return Compiled(
        kernel=made.kernel.__name__,
        case=case,
        registers=int(found[1]),
        stack=int(found[2]),
        shared=binary.metadata.shared,
        products=binary.asm["ttir"].count("tt.dot "),
        wgmma=ptx.count("wgmma.mma_async"),
        mma=len(re.findall(r"(?<!wg)mma\.sync", ptx)),
        tensor_cores=tensor_cores,
    )


def attention_launches(
    head: int, spacing: int, dtype: torch.dtype, blocks: int = 64, block: int = 8, groups: int = 2
) -> Iterator[tuple[str, Launch]]:
    """Every launch of a layer whose windows of 2,048 keys begin `spacing` keys apart."""
    sharing = 4
    lo = torch.arange(blocks)[:, None] * spacing + torch.arange(block)
    hi = lo[:, 0] + 2047
    ranges = KeyRanges(lo, hi)
    q = torch.zeros(groups, blocks * block * sharing, head, dtype=dtype)
    k = torch.zeros(int(hi[-1]), groups, head, dtype=dtype)
    own_k = torch.zeros(blocks, block, groups, head, dtype=dtype)
    own = OwnBlock(own_k, own_k, torch.ones(block, block, dtype=torch.bool))
    state = SoftmaxState.empty(q)
    upstream = Upstream(q, state.max, state.total)
    dk, d_own = k.float(), own_k.float()
    yield "own block and part", launch.forward_launch(state, q, k, k, ranges, own)
    yield "part", launch.forward_launch(state, q, k, k, ranges, None)
    dq = state.numerator
    for made in launch.query_gradient_launches(dq, q, upstream, k, k, ranges, own):
        yield ("own block" if not made.options["PART"] else "own block and part"), made
    for made in launch.query_gradient_launches(dq, q, upstream, k, k, ranges, None):
        yield "part", made
    yield "part", launch.key_gradient_launch(dk, dk, q, upstream, k, k, ranges)
    yield "own block", launch.own_gradient_launch(d_own, d_own, q, upstream, own, ranges)


def drafter_launches(
    dtype: torch.dtype, width: int = 5120, tokens: int = 4096
) -> Iterator[tuple[str, Launch]]:
    """Every launch of the drafter's own kernels, for a residual stream in float32 and products in `dtype`."""
    x = torch.zeros(4, 8, width)
    base, delta = torch.zeros(2, width), torch.zeros(4, 8, 2, width // 16, dtype=dtype)
    shares, narrow = torch.zeros(2, 2, width), x.to(dtype)
    yield "before a sublayer", convolution.convolve_launch(x, x, base, delta, None)
    yield "after a sublayer", convolution.convolve_launch(narrow, narrow, base, delta, None)
    yield "after, with residual", convolution.convolve_launch(x, narrow, base, delta, x)
    yield "before a sublayer", convolution.convolve_gradient_launch(x, delta, shares, x, x, base, delta)
    yield (
        "after a sublayer",
        convolution.convolve_gradient_launch(narrow, delta, shares, narrow, narrow, base, delta),
    )
    for name, rows in (("rows", x.view(-1, width)), ("heads", narrow.view(-1, 128))):
        weight = torch.ones(rows.shape[1])
        inverse = torch.zeros(len(rows))
        yield name, norm.norm_launch(rows, inverse, rows, weight, 1e-6)
        yield (
            name,
            norm.norm_gradient_launch(rows, torch.zeros(2, rows.shape[1]), rows, rows, weight, inverse),
        )
    yield "gate and up", swiglu.swiglu_launch(narrow, narrow, narrow)
    yield "gate and up", swiglu.swiglu_gradient_launch(narrow, narrow, narrow, narrow, narrow)
    products, gold = torch.zeros(4, tokens), torch.zeros(4, dtype=torch.int64)
    for name, softcap in (("head", None), ("head, soft cap", 20.0)):
        found = vocabulary.empty_statistics(products, segments=True)
        yield name, vocabulary.statistics_launch(found, products, gold, None, softcap)
        yield name, vocabulary.weights_launch(products.to(dtype), products, found.top, None, softcap)


def compile_all(heads: list[int]) -> Iterator[Compiled]:
    """Attention at `heads`: bf16 rows under close and distant blocks, and float32 rows."""
    for head in heads:
        for spacing, name in ((8, "close blocks"), (512, "distant blocks")):
            for case, made in attention_launches(head, spacing, torch.bfloat16):
                yield compile_launch(made, f"head {head}, {name}, {case}")
        for case, made in attention_launches(head, 8, torch.float32):
            yield compile_launch(made, f"head {head}, float32, {case}", tensor_cores=False)
    for case, made in drafter_launches(torch.bfloat16):
        yield compile_launch(made, case)


def render(rows: list[Compiled]) -> Table:
    table = Table(title=f"compiled for sm_90 by triton {triton.__version__}")
    for column in ("kernel", "case"):
        table.add_column(column)
    for column in ("registers", "shared", "stack", "products", "wgmma", "mma"):
        table.add_column(column, justify="right")
    table.add_column("problem")
    for row in rows:
        numbers = (row.registers, row.shared, row.stack, row.products, row.wgmma, row.mma)
        table.add_row(row.kernel, row.case, *(f"{number:,}" for number in numbers), row.problem)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--heads", default="64,128,256", help="head sizes, with commas")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    driver.set_active(_NoDevice())
    rows = list(compile_all([int(head) for head in options.heads.split(",")]))
    Console(width=170).print(render(rows))
    if options.json:
        content = [{**asdict(row), "problem": row.problem} for row in rows]
        options.json.write_text(
            json.dumps({"triton": triton.__version__, "kernels": content}, indent=2) + "\n"
        )
    return int(any(row.problem for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
