"""Tracebacks as text, as `traceback` writes them, for errors that travel: made on the event loop, in each failing call.

`traceback` asks the system about each source file every time, and parses each line to mark what failed in it: half a
millisecond for ten frames. What a frame at one instruction looks like does not change, so it is made once and kept.
"""

from __future__ import annotations

import itertools
import linecache
import sys
import traceback
from types import CodeType, FrameType, TracebackType

_KEPT = 1024
"""Frames whose text is kept; beyond that all are made again."""
_RECURSIVE = 3
"""Lines of a recursion that are shown, as in `traceback`."""
_BUILTIN = ("__main__", "builtins")
_PECULIAR = (BaseExceptionGroup, SyntaxError, NameError, AttributeError, ImportError)
"""What has more to show than a message: other errors, a place, what may have been meant."""

_texts: dict[tuple[int, int], tuple[CodeType, str]] = {}
"""By the id of the code, which is kept, and the instruction: codes of different files may be equal."""


def text_of_traceback(error: BaseException) -> str:
    """``"".join(traceback.format_exception(error))``."""
    chain: list[tuple[str, BaseException]] = []
    seen: set[int] = set()
    link = ""
    one: BaseException | None = error
    while one is not None:
        if isinstance(one, _PECULIAR) or hasattr(one, "__notes__") or id(one) in seen:
            return "".join(traceback.format_exception(error))
        seen.add(id(one))
        chain.append((link, one))
        if one.__cause__ is not None:
            link = "\nThe above exception was the direct cause of the following exception:\n\n"
            one = one.__cause__
        else:
            link = "\nDuring handling of the above exception, another exception occurred:\n\n"
            one = None if one.__suppress_context__ else one.__context__
    if hasattr(sys, "tracebacklimit"):
        return "".join(traceback.format_exception(error))
    parts: list[str] = []
    for place in range(len(chain) - 1, -1, -1):
        one = chain[place][1]
        _add_stack(parts, one.__traceback__)
        parts.append(_last_line(one))
        # Between this error and the one that it led to stands how it did.
        parts.append(chain[place][0])
    return "".join(parts)


def _last_line(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ in _BUILTIN else f"{kind.__module__}.{kind.__qualname__}"
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - whatever the user's __str__ raises
        text = "<exception str() failed>"
    return f"{name}: {text}\n" if text else f"{name}\n"


def _add_stack(parts: list[str], trace: TracebackType | None) -> None:
    if trace is None:
        return
    parts.append("Traceback (most recent call last):\n")
    last: tuple[str, int, str] | None = None
    times = 0
    while trace is not None:
        code = trace.tb_frame.f_code
        here = code.co_filename, trace.tb_lineno, code.co_name
        if here != last:
            _add_repeats(parts, times)
            last, times = here, 0
        times += 1
        if times <= _RECURSIVE:
            kept = _texts.get((id(code), trace.tb_lasti))
            parts.append(kept[1] if kept else _text(trace.tb_frame, trace.tb_lasti, trace.tb_lineno))
        trace = trace.tb_next
    _add_repeats(parts, times)


def _add_repeats(parts: list[str], times: int) -> None:
    more = times - _RECURSIVE
    if more > 0:
        parts.append(f"  [Previous line repeated {more} more time{'s' if more > 1 else ''}]\n")


def _text(frame: FrameType, instruction: int, line: int) -> str:
    code = frame.f_code
    positions = next(itertools.islice(code.co_positions(), instruction // 2, None), (None, None, None, None))
    # Source that is in no file, as of a zip archive, is found by what the module says of itself.
    linecache.lazycache(code.co_filename, frame.f_globals)
    summary = traceback.FrameSummary(
        code.co_filename,
        line,
        code.co_name,
        lookup_line=False,
        end_lineno=positions[1],
        colno=positions[2],
        end_colno=positions[3],
    )
    text = "".join(traceback.StackSummary.from_list([summary]).format())
    if len(_texts) >= _KEPT:
        _texts.clear()
    _texts[id(code), instruction] = code, text
    return text
