"""The checks that keep wrong rows out of a store (B1, B3)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipelines.parity import ParityError, RowCheck, compare_rows, parity_tolerance, reference_states
from pipelines.rowformat import RowFormat
from pipelines.taps import engine_layer_ids
from tests.pipelines.tiny_target import HIDDEN, LAYERS, TAPS, make_target


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    target = make_target(tmp_path_factory.mktemp("target") / "t", "qwen3")
    return reference_states(target, list(range(40, 90)), "float32")


def rows(states: list[Tensor], taps: list[int]) -> Tensor:
    return torch.cat([states[tap] for tap in taps], dim=1)


def test_equal_rows_pass_in_every_stored_dtype(states: list[Tensor]) -> None:
    assert max(compare_rows(rows(states, TAPS), TAPS, states, 1e-3).worst.values()) == 0
    assert max(compare_rows(rows(states, TAPS).bfloat16(), TAPS, states, 3e-2).worst.values()) < 0.01


def test_e4m3_rows_pass_and_the_next_layer_does_not(states: list[Tensor]) -> None:
    row_format = RowFormat("features", torch.float8_e4m3fn, len(TAPS), HIDDEN)
    tolerance = parity_tolerance(torch.float32, torch.float8_e4m3fn)
    stored = row_format.unpack(row_format.pack(rows(states, TAPS)))
    assert 0 < max(compare_rows(stored, TAPS, states, tolerance).worst.values()) < 0.04
    with pytest.raises(ParityError, match="off by one"):
        compare_rows(stored, [tap + 1 for tap in TAPS], states, tolerance)


def test_reference_is_the_hidden_state_stream(states: list[Tensor], tmp_path: Path) -> None:  # B3
    """Layer outputs are hidden_states[l + 1] of transformers, the last one before its norm."""
    from transformers import AutoModelForCausalLM

    target = make_target(tmp_path / "t", "qwen3")
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        hidden = model(torch.arange(40, 90)[None], output_hidden_states=True).hidden_states
    for layer in range(LAYERS - 1):
        assert torch.equal(states[layer], hidden[layer + 1][0])
    assert not torch.allclose(states[LAYERS - 1], hidden[LAYERS][0], atol=1e-2)
    assert torch.equal(states[LAYERS], hidden[LAYERS][0])


@pytest.mark.parametrize("shift", [-1, 1])
def test_tap_that_is_off_by_one_is_named(states: list[Tensor], shift: int) -> None:
    taps = [1, 3]
    wrong = rows(states, [1, 3 + shift])
    with pytest.raises(ParityError, match=rf"tap 3 .*row \d+.*outputs of layer {3 + shift} - off by one"):
        compare_rows(wrong, taps, states, 1e-3)


def test_unconverted_engine_ids_are_caught(states: list[Tensor]) -> None:
    """What comes out when the drafter's ids are given to the engine as they are."""
    assert engine_layer_ids([1, 3]) == [2, 4]
    entering = rows([torch.zeros_like(states[0]), *states], [1, 3])  # id l is the stream entering layer l
    with pytest.raises(ParityError, match="outputs of layer 0 - off by one"):
        compare_rows(entering, [1, 3], states, 1e-3)


def test_zero_and_permuted_rows_are_wrong_slots(states: list[Tensor]) -> None:
    zeroed = rows(states, TAPS).clone()
    zeroed[7] = 0
    with pytest.raises(ParityError, match="wrong cache slots - row 7 is all zeros"):
        compare_rows(zeroed, TAPS, states, 1e-3)
    swapped = rows(states, TAPS).clone()
    swapped[[4, 5]] = swapped[[5, 4]]
    with pytest.raises(ParityError, match="wrong cache slots - row 4 is the reference's row 5"):
        compare_rows(swapped, TAPS, states, 1e-3)


def test_normed_last_state_is_named(states: list[Tensor]) -> None:
    with pytest.raises(ParityError, match="final norm"):
        compare_rows(states[LAYERS], [LAYERS - 1], states, 1e-3)


def test_other_weights_are_another_computation(states: list[Tensor]) -> None:
    noisy = rows(states, TAPS)
    noisy = noisy + 0.05 * noisy.norm(dim=1, keepdim=True) * torch.randn_like(noisy) / HIDDEN**0.5
    with pytest.raises(ParityError, match="another computation"):
        compare_rows(noisy, TAPS, states, 1e-3)


def test_nan_is_a_mismatch(states: list[Tensor]) -> None:
    broken = rows(states, TAPS).clone()
    broken[3, 0] = float("nan")
    with pytest.raises(ParityError, match="row 3"):
        compare_rows(broken, TAPS, states, 1e-3)


def test_zero_rows_and_constant_taps_are_refused_without_a_reference() -> None:  # B1
    check = RowCheck([1, 3], 4)
    check.add(torch.randn(5, 8))
    bad = torch.randn(5, 8)
    bad[2, 4:] = 0
    with pytest.raises(ParityError, match="row 7 of tap 3"):
        check.add(bad)
    check = RowCheck([1, 3], 4)
    constant = torch.randn(6, 8)
    constant[:, :4] = 1.0
    check.add(constant[:3])
    check.add(constant[3:])
    with pytest.raises(ParityError, match="tap 1 has the same row for all 6 tokens"):
        check.finish(distinct_tokens=5)
    check.finish(distinct_tokens=1)  # one token repeated may have equal rows
