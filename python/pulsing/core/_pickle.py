"""Pickle protocol 5 with everything large beside the pickle: arrays, tensors, ``bytes`` and ``bytearray`` wherever they
stand in an object.

Arrays and tensors give their memory away as protocol 5 buffers. ``bytes`` and ``bytearray`` have no such hook, but the
pickler hands those of 64 KiB and more to its file as the objects they are, between pieces of the pickle; the file keeps
them so. A pickle with such pieces travels as a head that only counts them, its pieces, and then its buffers.

Classes and functions of ``__main__``, lambdas and local classes exist on this node only: what holds one is pickled
by value with cloudpickle instead.
"""

from __future__ import annotations

import functools
import pickle
import sys
import threading
from collections.abc import Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

from pulsing.core import _arrays
from pulsing.core._errors import text_of

if TYPE_CHECKING:
    from pulsing.core._system import ActorSystem

_MOST_BUFFERS = 2048
"""The lengths of all parts of a message fit the header of a frame; buffers beyond this many stay in the pickle."""
ATOMS = frozenset({int, float, bool, str, type(None)})
"""Types that pickle by themselves: nothing in them goes beside the pickle or travels by value."""
SHORT = 4096
"""Bytes of a ``bytes`` object that pickles by itself, too, though the pickler would keep a long one beside."""
GLOBAL = 0x93
"""Byte of a pickle of protocol 5 that names a class or a function. Where it is missing there is no reference either."""
_PIECES = b"\x00"
"""First byte of a head that counts pieces. A pickle of protocol 5 begins with 0x80."""


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
        elif type(obj).__module__ in _arrays.MODULES:
            return _arrays.reduce(obj)
        return NotImplemented


def _wrapped(cls: type) -> bool:
    """Whether the import path of `cls` leads to its `ActorClass` and not to itself."""
    from pulsing.core._remote import wrapper_of

    return wrapper_of(cls) is not None


class _Pieces:
    """The file of a pickler: keeps what is written, without a copy."""

    __slots__ = ("kept", "write")

    def __init__(self) -> None:
        self.kept: list[bytes | bytearray] = []
        self.write = self.kept.append


class _Joined:
    """The file of an unpickler that reads pieces as one."""

    __slots__ = ("_at", "_pieces", "_view")

    def __init__(self, pieces: Sequence[Any]) -> None:
        self._pieces = iter(pieces)
        self._view = memoryview(b"")
        self._at = 0

    def readinto(self, target: Any) -> int:
        """Fills `target`; less only at the end."""
        out = memoryview(target).cast("B")
        done = 0
        while done < len(out):
            if self._at == len(self._view):
                piece = next(self._pieces, None)
                if piece is None:
                    break
                self._view, self._at = memoryview(piece).cast("B"), 0
                continue
            n = min(len(out) - done, len(self._view) - self._at)
            out[done : done + n] = self._view[self._at : self._at + n]
            self._at += n
            done += n
        return done

    def read(self, size: int) -> bytes:
        """`size` bytes; less only at the end."""
        if self._at + size <= len(self._view):
            self._at += size
            return bytes(self._view[self._at - size : self._at])
        out = bytearray(size)
        return bytes(out[: self.readinto(out)])

    def readline(self) -> bytes:
        """A line, for the opcodes of old protocols."""
        line = bytearray()
        while (byte := self.read(1)) not in (b"", b"\n"):
            line += byte
        return bytes(line + byte)


def dumps(obj: Any) -> tuple[bytes, list[Any]]:
    """``(head, buffers)`` of `obj`. The buffers are the object's own memory: they change with it.

    Raises:
        TypeError: The object cannot be pickled; the message says what it was.
    """
    buffers: list[Any] = []
    kind = type(obj)
    if kind in ATOMS or (kind is bytes and len(obj) <= SHORT) or (kind is tuple and _all_atoms(obj)):
        return pickle.dumps(obj, 5), buffers

    def collect(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:
            return True  # not contiguous: pickle copies it in band
        if raw.nbytes < _arrays.OUT_OF_BAND_FROM or len(buffers) >= _MOST_BUFFERS:
            return True
        buffers.append(raw)
        return False

    pieces = _dump(obj, collect, buffers)
    if len(pieces) == 1:
        return bytes(pieces[0]), buffers
    if len(pieces) > _MOST_BUFFERS:
        return b"".join(pieces), buffers
    return _PIECES + len(pieces).to_bytes(4, "little"), pieces + buffers


def _all_atoms(values: tuple[Any, ...]) -> bool:
    """Whether a tuple holds atoms, short bytes, empty dicts and tuples of these only, as a plain call's envelope."""
    for value in values:
        kind = type(value)
        if kind in ATOMS or (kind is bytes and len(value) <= SHORT):
            continue
        if (kind is tuple and _all_atoms(value)) or (kind is dict and not value):
            continue
        return False
    return True


def dumps_whole(obj: Any) -> bytes:
    """`obj` as one block of bytes."""
    return b"".join(_dump(obj, None, []))


def _dump(obj: Any, callback: Any, buffers: list[Any]) -> list[Any]:
    out = _Pieces()
    try:
        _Pickler(out, protocol=5, buffer_callback=callback).dump(obj)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - whatever the object's own pickling raises
        out.kept.clear()
        return _dump_by_value(obj, callback, buffers)
    return out.kept


def _dump_by_value(obj: Any, callback: Any, buffers: list[Any]) -> list[Any]:
    buffers.clear()
    out = _Pieces()
    try:
        _by_value()(out, protocol=5, buffer_callback=callback).dump(obj)
    except MemoryError:
        raise
    except Exception as error:
        # The frames of an error often end in a cycle: see `_by_value`.
        buffers.clear()
        out.kept.clear()
        raise TypeError(f"cannot send a {type(obj).__name__} to another process: {text_of(error)}") from error
    return out.kept


@functools.cache
def _by_value() -> Any:
    # Only who sends such things pays for loading it.
    import cloudpickle

    usual = cloudpickle.Pickler.reducer_override

    # In a class and not on each pickler, which would refer to itself: the memory views that it holds must never be
    # garbage of a cycle. The collector clears them in any order, and CPython crashes over one that others look through.
    def reduce(self: Any, obj: Any) -> Any:
        # Found under its import path is the wrapper: cloudpickle would take the class itself for one that exists
        # here only, and send a copy that is another class over there.
        if isinstance(obj, type):
            if not _local_only(obj) and _wrapped(obj):
                return raw_class, (obj.__module__, obj.__qualname__)
        elif type(obj).__module__ in _arrays.MODULES:
            reduced = _arrays.reduce(obj)
            if reduced is not NotImplemented:
                return reduced
        return usual(self, obj)

    return type("ByValuePickler", (cloudpickle.Pickler,), {"reducer_override": reduce})


def loads(head: bytes, buffers: Sequence[Any] = (), system: ActorSystem | None = None) -> Any:
    """The object that `dumps` took apart. References to actors in it belong to `system`.

    Arrays and tensors are built on `buffers`; ``bytes`` and ``bytearray`` are copied out of them.
    """
    if GLOBAL not in head and head[:1] != _PIECES:
        return pickle.loads(head, buffers=buffers)
    before = getattr(_decoding, "system", None)
    _decoding.system = system or before
    try:
        if head[:1] != _PIECES:
            return pickle.loads(head, buffers=buffers)
        count = int.from_bytes(head[1:5], "little")
        if _decoding.system is not None:
            _decoding.system.counts.bytes_copied += sum(len(piece) for piece in buffers[:count])
        return pickle.Unpickler(_Joined(buffers[:count]), buffers=buffers[count:]).load()
    finally:
        _decoding.system = before


def copied(obj: Any, system: ActorSystem | None = None) -> Any:
    """`obj` as another process would get it, sharing no memory with it."""
    head, buffers = dumps(obj)
    return loads(head, [bytearray(buffer) for buffer in buffers], system)


_decoding = threading.local()


def decoding_system() -> ActorSystem | None:
    """The system whose message is being decoded on this thread."""
    return getattr(_decoding, "system", None)


def is_main(cls: type) -> bool:
    """Whether `cls` lives in the program itself, which other nodes cannot import."""
    return _local_only(cls) or cls.__module__ not in sys.modules
