"""The rows of the comparison: what each shows, and the bar it is held to."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One figure of a row.

    Attributes:
        key: Its name in what contestants report.
        title: Its column.
        digits: Digits after the point.
        scale: Factor from the reported unit to the shown one.
    """

    key: str
    title: str
    digits: int = 0
    scale: float = 1.0


P50 = Metric("p50_us", "p50 us", 1)
P99 = Metric("p99_us", "p99 us", 0)
P50_MS = Metric("p50_us", "p50 ms", 2, 1e-3)
P99_MS = Metric("p99_us", "p99 ms", 2, 1e-3)
RATE = Metric("rate", "calls/s")
CPU = Metric("cpu_us", "CPU us/call", 1)


@dataclass(frozen=True)
class Row:
    """One thing that is measured.

    Attributes:
        key: Its name.
        title: What is done.
        metrics: Its figures; the first one is the figure that is compared.
    """

    key: str
    title: str
    metrics: tuple[Metric, ...]


ROWS = (
    Row("local_seq", "local ask, sequential, plain method", (P50, P99, RATE, CPU)),
    Row("local_seq_async", "local ask, sequential, coroutine method", (P50, P99, RATE, CPU)),
    Row("local_64", "local ask, 64 in flight, plain method", (RATE, CPU)),
    Row("local_64_async", "local ask, 64 in flight, coroutine method", (RATE, CPU)),
    Row("local_tell", "local tell, until handled", (Metric("rate", "tells/s"), CPU)),
    Row("remote_seq", "ask between two processes, sequential, 64 B", (P50, P99, RATE, CPU)),
    Row("remote_seq_one", "the same, both processes on one core", (P50, P99, RATE, CPU)),
    Row("remote_seq_two", "the same, a core each", (P50, P99, RATE, CPU)),
    Row("remote_seq_async", "ask between two processes, coroutine method", (P50, P99, RATE, CPU)),
    Row("remote_64", "ask between two processes, 64 in flight", (RATE, CPU)),
    Row("remote_tell", "tell between two processes, until handled", (Metric("rate", "tells/s"), CPU)),
    Row(
        "remote_1000",
        "1,000 concurrent asks to one peer",
        (RATE, Metric("ms_a_burst", "ms a burst", 1), CPU, Metric("failed", "failed")),
    ),
    Row("stream", "stream between two processes, small tuples", (Metric("rate", "items/s"), CPU)),
    Row("echo_bytes", "10 MB of bytes there and back", (P50_MS, P99_MS, CPU)),
    Row("echo_bytes_one", "the same, both processes on one core", (P50_MS, P99_MS, CPU)),
    Row("echo_bytes_two", "the same, a core each", (P50_MS, P99_MS, CPU)),
    Row("echo_array", "10 MB numpy array there and back", (P50_MS, P99_MS, CPU)),
    Row("echo_sockets", "10 MB on blocking sockets there and back", (P50_MS, P99_MS, CPU)),
    Row("spawn", "spawn, sequential", (Metric("rate", "actors/s"), CPU)),
    Row("crowd", "many actors in one process", (Metric("bytes_each", "bytes each"), Metric("rate", "actors/s"))),
    Row("idle", "idle, one node", (Metric("rss_mb", "RSS MB", 1), Metric("cpu_percent", "% of a core", 2))),
    Row("idle_ten", "idle, ten nodes, each", (Metric("rss_mb", "RSS MB", 1), Metric("cpu_percent", "% of a core", 2))),
    Row("completion_seq", "Python -> Rust -> Python, sequential", (P50, P99, RATE, CPU)),
    Row("completion_100", "Python -> Rust -> Python, gather(100)", (RATE, CPU)),
)
BY_KEY = {row.key: row for row in ROWS}


@dataclass(frozen=True)
class Bar:
    """What a figure must be.

    Attributes:
        text: The bar in words.
        who, row, metric: Whose figure.
        limit: The figure is compared with this, times that of `against` if there is one.
        against: Contestants and rows to compare with; the best of them counts.
        above: The figure has to be at least the limit; else at most.
    """

    text: str
    who: str
    row: str
    metric: str
    limit: float
    against: tuple[tuple[str, str], ...] = ()
    above: bool = False


OURS = "pulsing uvloop"
BARS = (
    Bar("local ask, sequential, uvloop: p50 <= 10 us", OURS, "local_seq", "p50_us", 10),
    Bar("the same with a coroutine method", OURS, "local_seq_async", "p50_us", 10),
    Bar("local ask, 64 in flight: >= 100,000 calls/s", OURS, "local_64", "rate", 100_000, above=True),
    Bar("the same with a coroutine method", OURS, "local_64_async", "rate", 100_000, above=True),
    Bar(
        "ask between two processes: p50 <= 3x a bare uvloop TCP echo",
        OURS, "remote_seq", "p50_us", 3, (("TCP uvloop", "remote_seq"),),
    ),
    Bar(
        "the same, both sides on one core",
        OURS, "remote_seq_one", "p50_us", 3, (("TCP uvloop", "remote_seq_one"),),
    ),
    Bar(
        "the same, a core each",
        OURS, "remote_seq_two", "p50_us", 3, (("TCP uvloop", "remote_seq_two"),),
    ),
    Bar(
        "64 in flight between two processes: >= 10x xoscar",
        OURS, "remote_64", "rate", 10, (("xoscar", "remote_64"),), above=True,
    ),
    Bar(
        "64 in flight between two processes: >= 20x Ray",
        OURS, "remote_64", "rate", 20, (("ray", "remote_64"),), above=True,
    ),
    Bar("1,000 concurrent asks to one peer: none fails", OURS, "remote_1000", "failed", 0),
    Bar("stream between processes: >= 100,000 items/s", OURS, "stream", "rate", 100_000, above=True),
    Bar(
        "10 MB of bytes there and back: >= 70 % of a raw TCP echo (uvloop)",
        OURS, "echo_bytes", "p50_us", 1 / 0.7, (("TCP uvloop", "echo_bytes"),),
    ),
    Bar(
        "the same, both sides on one core",
        OURS, "echo_bytes_one", "p50_us", 1 / 0.7, (("TCP uvloop", "echo_bytes_one"),),
    ),
    Bar(
        "the same, a core each",
        OURS, "echo_bytes_two", "p50_us", 1 / 0.7, (("TCP uvloop", "echo_bytes_two"),),
    ),
    Bar(
        "the same as the kernel places it, against blocking sockets into a buffer made once",
        OURS, "echo_bytes", "p50_us", 1 / 0.7, (("TCP uvloop", "echo_sockets"),),
    ),
    Bar("idle node: < 45 MB RSS", OURS, "idle", "rss_mb", 45),
    Bar("idle node among ten: < 1 % of a core", OURS, "idle_ten", "cpu_percent", 1),
    Bar("spawn: >= 20,000 actors/s", OURS, "spawn", "rate", 20_000, above=True),
    Bar("100,000 actors in one process: <= 5 KB each", OURS, "crowd", "bytes_each", 5_000),
)  # fmt: skip
