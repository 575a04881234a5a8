"""How messages are waited for, with works that only note how."""

from datetime import timedelta

import pytest

from csbp.topology import Grid
from csbp.transport import Wire, WireError

LIMIT = timedelta(minutes=1)


class Work:
    def __init__(self, error=None):
        self.waits, self.error = [], error

    def wait(self, *limits):
        self.waits.append(limits)
        if self.error:
            raise self.error


@pytest.fixture
def wire():
    return Wire(Grid(world=16, rank=13, context_ranks=4, timeout=LIMIT))


def test_a_cpu_waits_with_a_limit_and_a_gpu_lets_its_stream_wait(wire):
    """PyTorch blocks the process, not the stream, as soon as a limit is given to NCCL's wait."""
    on_cpu, on_gpu = Work(), Work()
    wire.finish([on_cpu])
    wire.finish([on_gpu], on_gpu=True)
    assert on_cpu.waits == [(LIMIT,)]
    assert on_gpu.waits == [()]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_lost_peer_is_told_as_such(wire, on_gpu):
    with pytest.raises(WireError, match="replica 3"):
        wire.finish([Work(RuntimeError("connection reset"))], on_gpu=on_gpu)
    assert wire.waited > 0
