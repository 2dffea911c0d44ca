"""Pickle protocol 5 with out-of-band buffers: arrays and tensors are not copied into the pickle.

Classes and functions of ``__main__``, lambdas and local classes exist on this node only: what holds one is pickled
by value
with cloudpickle instead.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections.abc import Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulsing.core._system import ActorSystem

_OUT_OF_BAND_FROM = 4096
"""Smaller buffers are cheaper inside the pickle than as a part of the frame."""


class _ByValueError(Exception):
    """Something in the object can only travel by value."""


def _local_only(obj: FunctionType | type) -> bool:
    module = getattr(obj, "__module__", None)
    if module in ("__main__", "__mp_main__"):
        return True
    return "<" in getattr(obj, "__qualname__", "")


def raw_class(module: str, qualname: str) -> type:
    """The class that ``@remote`` wrapped under this import path."""
    from pulsing.core._remote import import_class

    return import_class(module, qualname).cls


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (FunctionType, type)):
            if _local_only(obj):
                raise _ByValueError
            if isinstance(obj, type) and _wrapped(obj):
                return raw_class, (obj.__module__, obj.__qualname__)
        return NotImplemented


def _wrapped(cls: type) -> bool:
    """Whether the import path of `cls` leads to its `ActorClass` and not to itself."""
    from pulsing.core._remote import wrapper_of

    return wrapper_of(cls) is not None


def dumps(obj: Any) -> tuple[bytes, list[Any]]:
    """``(head, buffers)`` of `obj`.

    Raises:
        TypeError: The object cannot be pickled; the message says what it was.
    """
    buffers: list[Any] = []

    def collect(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:
            return True  # not contiguous: pickle copies it in band
        if raw.nbytes < _OUT_OF_BAND_FROM:
            return True
        buffers.append(raw)
        return False

    return _dump(obj, collect, buffers), buffers


def dumps_whole(obj: Any) -> bytes:
    """`obj` as one block of bytes."""
    return _dump(obj, None, [])


def _dump(obj: Any, callback: Any, buffers: list[Any]) -> bytes:
    out = io.BytesIO()
    try:
        _Pickler(out, protocol=5, buffer_callback=callback).dump(obj)
    except (_ByValueError, pickle.PicklingError, TypeError, AttributeError):
        return _dump_by_value(obj, callback, buffers)
    return out.getvalue()


def _dump_by_value(obj: Any, callback: Any, buffers: list[Any]) -> bytes:
    buffers.clear()
    out = io.BytesIO()
    try:
        _by_value(out, callback).dump(obj)
    except Exception as error:
        raise TypeError(f"cannot send a {type(obj).__name__} to another process: {error}") from error
    return out.getvalue()


def _by_value(out: io.BytesIO, callback: Any) -> Any:
    # Only who sends such things pays for loading it.
    import cloudpickle

    pickler = cloudpickle.Pickler(out, protocol=5, buffer_callback=callback)
    usual = pickler.reducer_override

    def reduce(obj: Any) -> Any:
        # Found under its import path is the wrapper: cloudpickle would take the class itself for one that exists
        # here only, and send a copy that is another class over there.
        if isinstance(obj, type) and not _local_only(obj) and _wrapped(obj):
            return raw_class, (obj.__module__, obj.__qualname__)
        return usual(obj)

    pickler.reducer_override = reduce
    return pickler


def loads(head: bytes, buffers: Sequence[Any] = (), system: ActorSystem | None = None) -> Any:
    """The object that `dumps` took apart. References to actors in it belong to `system`."""
    before = getattr(_decoding, "system", None)
    _decoding.system = system or before
    try:
        return pickle.loads(head, buffers=buffers)
    finally:
        _decoding.system = before


_decoding = threading.local()


def decoding_system() -> ActorSystem | None:
    """The system whose message is being decoded on this thread."""
    return getattr(_decoding, "system", None)


def is_main(cls: type) -> bool:
    """Whether `cls` lives in the program itself, which other nodes cannot import."""
    return _local_only(cls) or cls.__module__ not in sys.modules
