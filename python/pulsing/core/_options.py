"""How a call is made."""

from __future__ import annotations

from typing import Final

from pulsing.core._checks import check_flag, check_seconds


class Default:
    """Stands for "what the system says" where None means "for ever"."""

    def __repr__(self) -> str:
        return "the system's default"


DEFAULT: Final = Default()

Timeout = float | None | Default


class Options:
    """How calls are made. Never changes.

    Args:
        timeout: Seconds until the first answer; None for ever.
        no_wait: Raise `MailboxFull` instead of waiting in a full mailbox.
        idempotent: The call may run twice: it is sent again, once, if its connection breaks within `timeout`.

    Raises:
        TypeError: Not of these types.
        ValueError: A timeout that is no positive number of seconds.
    """

    __slots__ = ("idempotent", "no_wait", "timeout")

    def __init__(self, timeout: Timeout = DEFAULT, no_wait: bool = False, idempotent: bool = False) -> None:
        if timeout is not DEFAULT and timeout is not None:
            check_seconds("timeout", timeout, above=True, or_none="for ever")
        check_flag("no_wait", no_wait)
        check_flag("idempotent", idempotent)
        self.timeout = timeout
        self.no_wait = no_wait
        self.idempotent = idempotent

    def changed(self, timeout: Timeout, no_wait: bool | None, idempotent: bool | None) -> Options:
        """The same but for what is given: a timeout other than `DEFAULT`, flags other than None."""
        return Options(
            self.timeout if timeout is DEFAULT else timeout,
            self.no_wait if no_wait is None else no_wait,
            self.idempotent if idempotent is None else idempotent,
        )

    def __repr__(self) -> str:
        return f"Options(timeout={self.timeout!r}, no_wait={self.no_wait}, idempotent={self.idempotent})"


PLAIN: Final = Options()
"""What calls are made with unless they say otherwise."""
