"""Load reports on their way to the Routers that subscribed to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulsing._core import LoadReport
    from pulsing.core._inbound import InboundCall
    from pulsing.serving._blocks import BlockReader

__all__ = ["LoadReports"]

# Heartbeat of load reports in seconds: a Router takes a worker's requests back after 1.5 s of silence. The protocol
# asks for one in 0.5 s; the sooner the last one before a hang, the sooner the hang is seen.
_HEARTBEAT = 0.2
# Load changes with every request; between two reports at least this long, or a fast engine reports more than it works.
_REPORT_GAP = 0.01


class LoadReports:
    """One stream of reports for each subscriber: at every change, and as a heartbeat. On the worker's loop."""

    def __init__(self) -> None:
        self._watchers: dict[asyncio.Task[Any], asyncio.Event] = {}
        # All of them know already that there is something to report.
        self._told = False
        self._ended = False

    def changed(self) -> None:
        """Something is different from what was reported last."""
        if self._told:
            return
        self._told = True
        for changed in self._watchers.values():
            changed.set()

    async def end(self) -> None:
        """Each subscriber gets a last report and the end of its stream, or Routers would take the end for a crash.

        Waits up to a second for that.
        """
        self._ended = True
        self.changed()
        if self._watchers:
            await asyncio.wait(set(self._watchers), timeout=1)

    async def send(self, call: InboundCall, report: Callable[[], LoadReport], reader: BlockReader | None) -> None:
        """Streams reports until the subscriber leaves or :meth:`end` is called.

        Args:
            call: the subscription.
            report: makes a report.
            reader: what tells of the blocks of prompts that are held, for a subscriber that wants to know; closed here.
        """
        changed = asyncio.Event()
        task = asyncio.current_task()
        assert task is not None  # protocol calls always run in a task
        self._watchers[task] = changed
        self._told = False
        try:
            while True:
                changed.clear()
                self._told = False
                await call.send(report().encode(None if reader is None else reader.take()))
                if self._ended:
                    call.end()
                    return
                await asyncio.sleep(_REPORT_GAP)
                if reader is not None and reader.behind:
                    continue
                try:
                    await asyncio.wait_for(changed.wait(), _HEARTBEAT - _REPORT_GAP)
                except TimeoutError:
                    continue
        finally:
            del self._watchers[task]
            if reader is not None:
                reader.close()
