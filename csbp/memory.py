"""Peak bytes of tensors that one process holds during a step.

On CUDA the caching allocator keeps the figure. On CPU nothing does, so a dispatch mode watches every operator
that runs and counts each storage once, from the operator that made it until its last reference is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class PeakTracker:
    """Context manager that measures the peak of live tensor bytes of the calling thread.

    On CPU it counts what operators allocate inside the context, in the forward pass, in the backward pass
    (the engine runs a CPU graph on the thread that called `backward`) and inside `autograd.Function`s, plus
    the tensors given to `track`. Storages that existed before and were not tracked are not counted, nor are
    workspaces inside a kernel that never become tensors. On CUDA `track` does nothing, because the allocator
    already counts every tensor of the device.

    Args:
        device: the device to watch.

    Attributes:
        peak_bytes: highest value of `live_bytes` since the context was entered (also readable afterwards).
        live_bytes: bytes of the counted storages that are alive now.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._counter: _CudaCounter | _StorageCounter = (
            _CudaCounter(self.device) if self.device.type == "cuda" else _StorageCounter()
        )

    @property
    def peak_bytes(self) -> int:
        return self._counter.peak_bytes

    @property
    def live_bytes(self) -> int:
        return self._counter.live_bytes

    def track(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made outside the context, such as parameters and optimizer state."""
        for tensor in tensors:
            self._counter.add(tensor)

    def __enter__(self) -> PeakTracker:
        self._counter.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._counter.__exit__(kind, error, trace)


class _CudaCounter:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._final: int | None = None

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._final is None else self._final

    @property
    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def add(self, tensor: Tensor) -> None:
        """Every tensor of the device is counted by the allocator already."""

    def __enter__(self) -> _CudaCounter:
        self._final = None
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.synchronize(self._device)
        self._final = torch.cuda.max_memory_allocated(self._device)


class _StorageCounter(TorchDispatchMode):
    """Counts storages by the address of their C++ object, which is unique while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._bytes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata  # the one identity that all views of a storage share
        size = storage.nbytes()
        if key not in self._bytes:
            self._references[key] = weakref.ref(storage, lambda _, key=key: self._release(key))  # type: ignore[misc]
        self.live_bytes += size - self._bytes.get(key, 0)
        self._bytes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _release(self, key: int) -> None:
        self.live_bytes -= self._bytes.pop(key)
        del self._references[key]

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {
            tensor.untyped_storage()._cdata
            for tensor in _tensors((*args, *kwargs.values()))
            if tensor.layout is torch.strided
        }
        fresh = func is torch.ops.aten.lift_fresh.default  # `torch.tensor` allocates below the dispatcher
        for tensor in _tensors((result,)):
            if tensor.layout is torch.strided:
                key = tensor.untyped_storage()._cdata
                if fresh or key not in given or key in self._bytes:
                    self.add(tensor)
        return result


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
