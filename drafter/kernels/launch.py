"""One kernel with everything that its launch needs, so that it can be compiled without a device too."""

from __future__ import annotations

from typing import Any, NamedTuple

_FUSION = {"enable_fp_fusion": True}  # Triton's default is about to change


class Launch(NamedTuple):
    """Attributes:
    kernel: a `triton.jit` function.
    grid: programs.
    arguments: in the kernel's order.
    options: compile-time values and `num_warps`, `num_stages`.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        if 0 not in self.grid:
            self.kernel[self.grid](*self.arguments, **self.options, **_FUSION)

    def compile(self) -> Any:
        """Compile for the active driver's target, which need not be there, and start nothing."""
        return self.kernel.warmup(*self.arguments, grid=self.grid, **self.options, **_FUSION)


def power_above(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()
