"""Ends vLLM's processes when the worker that started them is gone, however it went. A program of its own.

vLLM's engine does not notice a ``kill -9`` of its parent: it would hold its GPU until somebody finds it. The worker
holds a pipe to this program and gives its engine's processes, and so theirs, a mark in the environment. When the pipe
ends, what carries the mark is killed. Standard library only, and started with -I -S: it must cost next to nothing.

    python -I -S _vllm_guardian.py NAME=VALUE [FOLDER]     (the mark; what the engine has there goes with it)
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

# A killed process may have started another one a moment before.
QUIET = 0.5
# What cannot be killed within this time hangs in the kernel, and waiting helps no more.
LIMIT = 30.0


def marked(mark: bytes) -> Iterator[int]:
    """Pids of living processes that carry the mark."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        # Processes end while one looks, and those of other users cannot be read.
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark not in file.read().split(b"\0"):
                    continue
            with open(f"/proc/{name}/cmdline", "rb") as file:
                # Python's own cleaner of shared memory serves the whole worker, and ends by itself after its work.
                if b"resource_tracker" not in file.read():
                    yield int(name)


def main() -> None:
    mark = os.fsencode(sys.argv[1])
    # The worker's terminal may be closed and its group signalled; this program goes by the pipe alone.
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    while os.read(0, 64):
        pass
    begun = last = time.monotonic()
    while time.monotonic() - last < QUIET and time.monotonic() - begun < LIMIT:
        for pid in marked(mark):
            last = time.monotonic()
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for folder in sys.argv[2:]:
        # A worker that ends in order has removed it itself.
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))
            os.rmdir(folder)


if __name__ == "__main__":
    main()
