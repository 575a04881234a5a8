import pytest
import torch

from csbp import backends
from csbp.attention import TORCH
from csbp.backends import BackendError, choose_backend, load_backend
from csbp.flash import FLASH

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def test_kernels_are_taken_where_they_can_run():
    assert choose_backend("auto", GPU, torch.bfloat16) == ("triton", "")
    assert choose_backend("auto", GPU, torch.float16) == ("triton", "")


def test_every_fallback_has_a_reason(monkeypatch):
    assert choose_backend("auto", CPU, torch.bfloat16)[0] == "torch"
    assert "cpu" in choose_backend("auto", CPU, torch.bfloat16)[1]
    name, reason = choose_backend("auto", GPU, torch.float32)
    assert name == "torch"
    assert "float32" in reason
    monkeypatch.setattr(backends, "_has_triton", lambda: False)
    name, reason = choose_backend("auto", GPU, torch.bfloat16)
    assert name == "torch"
    assert "not installed" in reason


def test_a_backend_that_was_asked_for_is_taken():
    assert choose_backend("torch", GPU, torch.bfloat16) == ("torch", "")
    assert choose_backend("triton", CPU, torch.float32) == ("triton", "")


def test_backends_that_cannot_be_loaded(monkeypatch):
    assert load_backend("torch") is TORCH
    assert load_backend("flash") is FLASH
    with pytest.raises(BackendError, match="found 'fast'"):
        load_backend("fast")
    monkeypatch.setattr(backends, "_has_triton", lambda: False)
    with pytest.raises(BackendError, match="install it"):
        load_backend("triton")
