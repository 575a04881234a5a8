import pytest
import torch

from csbp import race as module
from csbp.cost import DrafterShape, Workload
from csbp.race import race, share_of_a_rank
from drafter.attention import LayerMask

SLIDING, FULL = LayerMask(16, causal=False), LayerMask(None, causal=False)


def shape(*masks: LayerMask) -> DrafterShape:
    return DrafterShape(
        hidden=32, intermediate=64, heads=4, kv_heads=2, head_size=16, vocabulary=64, feature_width=32,
        block_size=4, masks=masks,
    )  # fmt: skip


def test_backends_are_timed_on_the_same_step_and_gradients_are_part_of_it(monkeypatch):
    met = []

    def seconds(attention, operands, device):
        output = attention(0, *operands)
        met.append((attention.backend, [x.data_ptr() for x in operands], output.detach()))
        return 3.0 if attention.backend is met[0][0] else 2.0

    monkeypatch.setattr(module, "_seconds", seconds)
    found = race(
        ["torch", "flash"], shape(FULL, SLIDING, FULL), Workload(64, 6), torch.float32, torch.device("cpu")
    )
    assert found == {"torch": 9.0, "flash": 6.0}  # a median a layer, three layers
    turns = [backend for backend, _, _ in met]
    assert turns == turns[:2] * (len(turns) // 2)  # in turn
    for (_, plain, wanted), (_, other, output) in zip(met[::2], met[1::2], strict=True):
        assert plain == other
        torch.testing.assert_close(output, wanted)


def test_clock_runs_over_forward_and_backward():
    found = race(["torch", "flash"], shape(SLIDING), Workload(64, 6), torch.float32, torch.device("cpu"))
    assert set(found) == {"torch", "flash"}
    assert all(spent > 0 for spent in found.values())


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_share_of_a_rank_is_a_legal_step(ranks):
    work = Workload(40, 20, sequences=2, anchor_rule="locality", neighbourhoods=4)
    share = share_of_a_rank(work, ranks)
    assert share.anchors == max(1, 20 // ranks)
    assert 1 <= share.neighbourhoods <= share.anchors < share.context
    assert share_of_a_rank(work, 1) == work
