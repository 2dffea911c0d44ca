"""The load generator of `pulsing bench`, in Rust. `pulsing.cli._bench` is its user."""

from collections.abc import Callable

__version__: str
DEFINITIONS: list[tuple[str, str]]
"""Name and definition of every number in a report."""

class Run:
    """A run that goes on in threads of its own; dropping it stops it."""

    def __init__(self, config: str) -> None:
        """Starts at once.

        Args:
            config: a JSON object; its fields and defaults are listed in docs/guides/bench.md.

        Raises:
            ValueError: an unknown field, a wrong type or a value that cannot be meant.
            RuntimeError: the machine gives no threads.
        """

    def wait(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds; True when the run is over. Other Python threads run meanwhile."""

    def progress(self) -> str:
        """How far it is, as a JSON object. Latencies are in milliseconds and over the latest requests."""

    def stop(self) -> None:
        """Ends it early: requests in flight are cut off, the report holds what was measured."""

    def report(self, count_tokens: Callable[[str], int] | None = None) -> str:
        """The report as JSON, once the run is over.

        Args:
            count_tokens: a tokenizer, for answers that came without usage and whose text was kept (`keep_text`).

        Raises:
            ConnectionError: the server did not answer a first request as such a server does.
            KeyboardInterrupt: `stop` came before anything was measured.
            ValueError: the configuration cannot be meant, or the run is not over.
        """

    def requests(self) -> list[str]:
        """One JSON object per request of the points, once the run is over."""
