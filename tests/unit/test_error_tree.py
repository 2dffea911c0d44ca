"""R7: Rust's errors, the exceptions, and the tree at the top of `exceptions.py` say the same."""

from __future__ import annotations

import re

from pulsing import _core, exceptions
from pulsing.core._errors import from_core
from pulsing.exceptions import PulsingError, RemoteTraceback

FIELDS = {
    "timeout": {"what": "x", "after": 1.5},
    "too_large": {"size": 9, "limit": 8},
    "reply_too_large": {"size": 9, "limit": 8},
    "app": {"type_name": "m.E", "message": "no", "traceback": "", "code": 0, "data": b""},
}


def tree() -> dict[str, tuple[str | None, str]]:
    """Class name to parent and remark, read off the docstring."""
    found: dict[str, tuple[str | None, str]] = {}
    path: list[str] = []
    for line in (exceptions.__doc__ or "").splitlines():
        match = re.fullmatch(r"    ((?:│   |    )*)(?:[├└]── )?(\w+)(?: +(.*))?", line)
        if match is None or not (line.strip().startswith(("├", "└", "│")) or match[2] == "PulsingError"):
            continue
        depth = len(match[1]) // 4 + ("──" in line)
        path = [*path[:depth], match[2]]
        found[match[2]] = (path[-2] if depth else None, match[3] or "")
    return found


def test_r7_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    told = tree()
    classes = {name: getattr(exceptions, name) for name in exceptions.__all__}
    classes = {name: cls for name, cls in classes.items() if cls is not RemoteTraceback}
    assert set(told) == set(classes)
    for name, cls in classes.items():
        parent, remark = told[name]
        assert issubclass(cls, PulsingError)
        assert parent == (None if cls is PulsingError else cls.__bases__[0].__name__), name
        also = [base.__name__ for base in cls.__bases__[1:]]
        assert re.findall(r"\(also (\w+)\)", remark) == also, name


def test_r7_every_rust_error_has_its_own_class_that_agrees_about_the_callee() -> None:
    kinds = _core.error_kinds()
    assert len(kinds) > 20
    classes = {}
    for kind, state in kinds:
        error = from_core((kind, f"text of {kind}", FIELDS.get(kind, {}), state))
        assert isinstance(error, PulsingError)
        assert error.state_changed == state == type(error).state_changed, kind
        assert error.retry_safe == (state == "no")
        assert type(error).__name__ in exceptions.__all__
        assert type(error) is not exceptions.PulsingRuntimeError, f"{kind} has no class of its own"
        classes.setdefault(type(error), []).append(kind)
    shared = sorted(kinds for kinds in classes.values() if len(kinds) > 1)
    assert shared == [["invalid_address", "invalid_id", "config"]]


def test_r7_sizes_are_told() -> None:
    error = from_core(("reply_too_large", "text", {"size": 9, "limit": 8}, "yes"))
    assert isinstance(error, exceptions.TooLargeError)
    assert (error.size, error.limit) == (9, 8)
