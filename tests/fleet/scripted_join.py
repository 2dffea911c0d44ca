"""Stands in for the EngineWorker: tells a file when it joins and when it leaves."""

import pathlib
import signal
import sys
import time
import urllib.request

events, seeds, name, url = sys.argv[1:]
# What an EngineWorker does first.
with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
    pid = answer.read().decode()


def note(text: str) -> None:
    with pathlib.Path(events).open("a") as file:
        file.write(f"{text}\n")


def leave(*_: object) -> None:
    # Leaving takes a while; the engine must stay until it is done.
    time.sleep(0.3)
    with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        answer.read()
    note("left")
    sys.exit(0)


signal.signal(signal.SIGTERM, leave)
note(f"joined {seeds} {name} {url} {pid}")
while True:
    time.sleep(60)
