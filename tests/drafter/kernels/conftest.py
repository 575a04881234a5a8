import pytest

from tests.interpreted import interpreted

MODULES = ("convolution", "norm", "swiglu", "vocabulary")


@pytest.fixture(scope="package")
def kernels():
    """The drafter's kernels by module, run by Triton's interpreter."""
    with interpreted([f"drafter.kernels.{name}" for name in MODULES]) as modules:
        yield {name.rsplit(".", 1)[1]: module for name, module in modules.items()}
