"""The descriptors 0, 1 and 2, and Python's streams on them."""

import os
import sys


def hold() -> None:
    """Opens the null device at each of the three that is closed, and gives Python the streams that it lacks then.

    Who starts a program without them (`>&-`, some supervisors) would have the next sockets and event queues take their
    numbers: log lines would go to a peer, and uvloop aborts the process that closes one of them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is this one. A child is to have it, too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as the process lives
            setattr(sys, name, stream)
