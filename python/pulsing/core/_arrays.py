"""How arrays, tensors and memory views are taken apart so that their data travels beside the pickle and not in it.

The libraries are never imported for this: an object of one can only be met where its module is loaded already.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

OUT_OF_BAND_FROM = 4096
"""Buffers of fewer bytes stay in the pickle: up to here a call costs the same either way (30 us of a release build with
200 in flight), at 8 KiB a buffer beside the pickle saves a tenth, at 32 KiB a third."""

MODULES = frozenset({"numpy", "torch", "builtins"})
"""Where the types that `reduce` knows say they are from."""


def reduce(obj: Any) -> Any:
    """What `pickle` should make of `obj`, or NotImplemented to leave it to the object itself."""
    kind = type(obj)
    if kind is memoryview:
        return _reduce_view(obj)
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray:
        return _reduce_array(numpy, obj)
    torch = sys.modules.get("torch")
    if torch is not None and kind is torch.Tensor:
        return _reduce_tensor(torch, obj)
    return NotImplemented


def _reduce_array(numpy: Any, array: Any) -> Any:
    flags = array.flags
    if array.dtype.hasobject:
        return NotImplemented
    if not (flags.c_contiguous or flags.f_contiguous):
        return numpy.ascontiguousarray(array).__reduce_ex__(5)
    if array.dtype.kind in "mM" and array.nbytes >= OUT_OF_BAND_FROM:
        # Times have no letter in the buffer protocol: they go as the integers they are.
        return array_as, (array.view(numpy.int64), array.dtype)
    if not flags.writeable and array.nbytes < OUT_OF_BAND_FROM:
        # In the pickle a read-only buffer becomes `bytes`, and the array on it could never be written to.
        return array.copy(order="A").__reduce_ex__(5)
    return NotImplemented


def array_as(array: Any, dtype: Any) -> Any:
    """`array` with its bytes read as `dtype`."""
    return array.view(dtype)


def _reduce_tensor(torch: Any, tensor: Any) -> Any:
    plain = (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
        and not tensor.__dict__
        and not tensor._backward_hooks
    )
    if not plain:
        return NotImplemented
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    try:
        raw = values.reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError):
        # A torch without numpy has no way to its memory; an element type without bytes has no use for one.
        return NotImplemented
    device = None if tensor.device.type == "cpu" else str(tensor.device)
    dtype = str(values.dtype).removeprefix("torch.")
    return tensor_on, (pickle.PickleBuffer(raw), dtype, tuple(values.shape), tensor.requires_grad, device)


def tensor_on(buffer: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool, device: str | None) -> Any:
    """A tensor on received memory; on `device` if this node has it, else on the CPU."""
    import torch

    kind: Any = getattr(torch, dtype)
    if memoryview(buffer).nbytes:
        tensor = torch.frombuffer(buffer, dtype=kind).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=kind)
    if device is not None and torch.cuda.is_available():
        index = torch.device(device).index or 0
        if index < torch.cuda.device_count():
            tensor = tensor.to(device)
    return tensor.requires_grad_() if requires_grad else tensor


def _reduce_view(view: memoryview) -> Any:
    if view.nbytes == 0 or not view.contiguous:
        data: Any = bytearray(view.tobytes())
    elif view.c_contiguous:
        data = pickle.PickleBuffer(view)
    else:
        data = bytearray(view.tobytes())
    return view_on, (data, view.format, view.shape, view.readonly)


def view_on(buffer: Any, format: str, shape: tuple[int, ...], readonly: bool) -> memoryview:
    """A memory view like the one that was sent, on received memory."""
    cast: Any = memoryview(buffer).cast("B").cast
    # A view cannot be given a shape that holds nothing.
    view: memoryview = cast(format) if 0 in shape or len(shape) == 1 else cast(format, shape)
    return view.toreadonly() if readonly else view
