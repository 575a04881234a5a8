import pytest

from tests.interpreted import interpreted


@pytest.fixture(scope="package")
def triton_backend():
    """The Triton backend, run by Triton's interpreter."""
    with interpreted(["csbp.kernels.launch"]) as modules:
        yield modules["csbp.kernels.launch"]
