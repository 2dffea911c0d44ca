"""Entry point of the `pulsing` command.

What a command does is imported when it runs: `pulsing --help` and `pulsing inspect` load no engine.
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from pulsing.cli import _argv, _fleet, _logging
from pulsing.cli._errors import CliError, MisuseError
from pulsing.cli._inspect_source import Source
from pulsing.cli._settings import option, with_flags
from pulsing.core import _stdio
from pulsing.core._shown import brief, legible

app = typer.Typer(
    name="pulsing",
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    help="Turns N machines into one LLM serving cluster: start actors, look at them, load-test them.",
)
inspect_app = typer.Typer(
    no_args_is_help=False,
    rich_markup_mode=None,
    help="Look at a running cluster without joining it. A host without a port means port 8000.",
)
app.add_typer(inspect_app, name="inspect")

# What stands after `--`; typer would mix it with its own arguments.
_constructor_tokens: list[str] | None = None

Seeds = Annotated[
    str | None, typer.Option("--seeds", metavar="A,B", help="host:port of nodes to ask, separated by commas.")
]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="How long one node may take to answer.")]
PassphraseFile = Annotated[
    str | None, option("passphrase_file", "The secret of a cluster that has one.", from_env=True)
]
Cert = Annotated[
    str | None,
    option("cert", "PEM file of a certificate of the cluster's authority, where nodes have some.", from_env=True),
]
Key = Annotated[str | None, option("key", from_env=True)]
Ca = Annotated[str | None, option("ca", "PEM file of the authority.", from_env=True)]
Cluster = Annotated[str, option("cluster", "Its name; matters with a secret or certificates only.", from_env=True)]
BestEffort = Annotated[
    bool,
    typer.Option(
        "--best_effort", help="Show what the others say when a node fails; by default the command ends there."
    ),
]
Json = Annotated[bool, typer.Option("--json_output", "--json", help="Print JSON and nothing else.")]


def _version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        typer.echo(f"pulsing {importlib.metadata.version('pulsing')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        raise MisuseError(f"a command is missing\n{ctx.get_usage()}\nTry 'pulsing --help'.")


@app.command(
    add_help_option=False,
    help=(
        "Start an actor and keep it running until SIGTERM or Ctrl-C (a second one ends it at once). "
        "CLASS is package.module.Class. What stands after -- goes to its constructor: -- --key value ... "
        "`pulsing actor CLASS --help` lists the constructor's parameters. "
        "Settings come from flags, PULSING_* variables or --config, in that order of precedence."
    ),
)
@with_flags
def actor(
    ctx: typer.Context,
    cls: Annotated[str | None, typer.Argument(metavar="CLASS", help="For example pulsing.serving.Router.")] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", help="Name the actor serves under. Default: worker, or what its class says (a Router: router)."
        ),
    ] = None,
    define: Annotated[
        list[str] | None,
        typer.Option(
            "-D",
            "--define",
            metavar="KEY=JSON",
            help="actor.extra_kwargs='{\"key\": 1}': constructor arguments as JSON.",
        ),
    ] = None,
    config: Annotated[str | None, typer.Option("--config", metavar="FILE", help="TOML file of these settings.")] = None,
    show_help: Annotated[
        bool, typer.Option("--help", help="Show this message, and the constructor's parameters of CLASS.")
    ] = False,
    **flags: Any,
) -> None:
    from pulsing.cli import _actor

    if show_help:
        typer.echo(ctx.get_help())
        if cls is not None:
            typer.echo("\n" + _actor.class_help(cls))
        return
    if cls is None:
        raise MisuseError("CLASS is missing, as in: pulsing actor pulsing.serving.Router --addr 0.0.0.0:8000")
    options = [_argv.canonical(spelling) for param in ctx.command.params for spelling in param.opts]
    _actor.run(cls, name, flags, config, _constructor_tokens or [], define or [], options)


@inspect_app.callback(invoke_without_command=True)
def _inspect_root(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        raise MisuseError(f"a command is missing\n{ctx.get_usage()}\nTry 'pulsing inspect --help'.")


@inspect_app.command("cluster", help="Members of the cluster as the first seed that answers sees them.")
def inspect_cluster(
    seeds: Seeds = None,
    timeout: Timeout = 10.0,
    passphrase_file: PassphraseFile = None,
    cert: Cert = None,
    key: Key = None,
    ca: Ca = None,
    cluster: Cluster = "default",
    best_effort: BestEffort = False,
    json_output: Json = False,
) -> None:
    from pulsing.cli import _inspect

    _inspect.cluster(Source(seeds, timeout, best_effort, None, passphrase_file, cluster, (cert, key, ca)), json_output)


@inspect_app.command(
    "actors", help="Actors of one node and those it knows of (--endpoint), or names and their instances (--seeds)."
)
def inspect_actors(
    seeds: Seeds = None,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", metavar="HOST:PORT", help="The one node to ask.")
    ] = None,
    top: Annotated[int | None, typer.Option("--top", min=1, help="Show at most this many rows.")] = None,
    filter_: Annotated[
        str | None, typer.Option("--filter", help="Show names and classes that contain this text.")
    ] = None,
    all_actors: Annotated[bool, typer.Option("--all_actors", help="Show internal actors too.")] = False,
    detailed: Annotated[bool, typer.Option("--detailed", help="Show actor ids and all metadata.")] = False,
    timeout: Timeout = 10.0,
    passphrase_file: PassphraseFile = None,
    cert: Cert = None,
    key: Key = None,
    ca: Ca = None,
    cluster: Cluster = "default",
    best_effort: BestEffort = False,
    json_output: Json = False,
) -> None:
    from pulsing.cli import _inspect

    view = _inspect.View(top, filter_, all_actors, detailed, json_output)
    _inspect.actors(Source(seeds, timeout, best_effort, endpoint, passphrase_file, cluster, (cert, key, ca)), view)


@inspect_app.command("metrics", help="Counters of every node, and those of its Routers' HTTP servers.")
def inspect_metrics(
    seeds: Seeds = None,
    raw: Annotated[
        bool, typer.Option("--raw/--no_raw", help="Print the Prometheus text as it came; false: key figures.")
    ] = True,
    timeout: Timeout = 10.0,
    passphrase_file: PassphraseFile = None,
    cert: Cert = None,
    key: Key = None,
    ca: Ca = None,
    cluster: Cluster = "default",
    best_effort: BestEffort = False,
    json_output: Json = False,
) -> None:
    from pulsing.cli import _inspect

    _inspect.metrics(
        Source(seeds, timeout, best_effort, None, passphrase_file, cluster, (cert, key, ca)), raw, json_output
    )


@inspect_app.command("watch", help="Print what changes in the cluster until Ctrl-C.")
def inspect_watch(
    seeds: Seeds = None,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.05, help="Time between two looks.")
    ] = 1.0,
    kind: Annotated[str, typer.Option("--kind", help="cluster, actors, metrics or all.")] = "all",
    max_rounds: Annotated[int | None, typer.Option("--max_rounds", min=1, help="Stop after this many looks.")] = None,
    timeout: Timeout = 10.0,
    passphrase_file: PassphraseFile = None,
    cert: Cert = None,
    key: Key = None,
    ca: Ca = None,
    cluster: Cluster = "default",
    best_effort: BestEffort = False,
) -> None:
    from pulsing.cli import _inspect

    _inspect.watch(
        Source(seeds, timeout, best_effort, None, passphrase_file, cluster, (cert, key, ca)), interval, kind, max_rounds
    )


@app.command(
    help=(
        "Load-test an OpenAI-compatible server and say how far its numbers can be trusted. "
        "MODEL is the name the server knows it by. What each number means: docs/guides/bench.md and every JSON report."
    )
)
def bench(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="For example gpt2.")] = None,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="Root of the server, as in http://localhost:8080.")
    ] = None,
    benchmark_kind: Annotated[
        str, typer.Option("--benchmark_kind", "--mode", help="throughput, rate, sweep or csweep.")
    ] = "throughput",
    max_vus: Annotated[
        int, typer.Option("--max_vus", help="Users of a closed loop; most requests in flight of an open one.")
    ] = 128,
    duration: Annotated[str, typer.Option("--duration", metavar="TIME", help="Length of each point.")] = "120s",
    warmup: Annotated[
        str, typer.Option("--warmup", metavar="TIME", help="Load before the first point, in no result.")
    ] = "30s",
    rates: Annotated[
        str | None, typer.Option("--rates", metavar="A,B", help="Requests per second, of kind rate.")
    ] = None,
    num_rates: Annotated[int, typer.Option("--num_rates", help="Points of a sweep or csweep.")] = 10,
    concurrency: Annotated[
        str | None, typer.Option("--concurrency", metavar="A,B", help="Users of each point of a csweep.")
    ] = None,
    arrival: Annotated[str, typer.Option("--arrival", help="Law of an open loop: constant or poisson.")] = "poisson",
    on_full: Annotated[
        str, typer.Option("--on_full", help="What an open loop does at max_vus: queue or drop.")
    ] = "queue",
    input_tokens: Annotated[
        str, typer.Option("--input_tokens", metavar="N|LOW-HIGH", help="Length of prompts.")
    ] = "200",
    output_tokens: Annotated[
        str, typer.Option("--output_tokens", metavar="N|LOW-HIGH", help="max_tokens of requests.")
    ] = "128",
    slo: Annotated[
        str | None, typer.Option("--slo", metavar="ttft=500ms,...", help="Objectives for ttft, tpot, e2e: goodput.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api_key", metavar="KEY", help="Bearer token. Default: PULSING_BENCH_API_KEY. In no report."),
    ] = None,
    tokenizer_name: Annotated[
        str | None,
        typer.Option("--tokenizer_name", metavar="PATH|NAME", help="Counts answers without usage. Default: none."),
    ] = None,
    hf_token: Annotated[
        str | None, typer.Option("--hf_token", metavar="TOKEN", help="To fetch a tokenizer by name.")
    ] = None,
    endpoint: Annotated[str, typer.Option("--endpoint", help="auto, chat or completions.")] = "auto",
    connection: Annotated[str, typer.Option("--connection", help="reuse, or new for each request.")] = "reuse",
    timeout: Annotated[
        str | None,
        typer.Option(
            "--timeout", metavar="first=120s,...", help="Limits: connect (5s), first (120s), idle (60s), total (none)."
        ),
    ] = None,
    drain: Annotated[
        str, typer.Option("--drain", metavar="TIME", help="How long a point waits for its last answers.")
    ] = "30s",
    num_workers: Annotated[int, typer.Option("--num_workers", help="Threads of the load generator.")] = 4,
    seed: Annotated[int | None, typer.Option("--seed", help="Of prompts and arrivals. Default: random.")] = None,
    extra_body: Annotated[
        str | None, typer.Option("--extra_body", metavar="JSON", help="Merged into each request's body.")
    ] = None,
    output: Annotated[
        pathlib.Path | None, typer.Option("--output", metavar="FILE", help="Write the JSON report here.")
    ] = None,
    requests_output: Annotated[
        pathlib.Path | None,
        typer.Option("--requests_output", metavar="FILE", help="Write one JSON line per request here."),
    ] = None,
    json_output: Json = False,
) -> None:
    from pulsing.cli import _bench

    _bench.run(
        _bench.Options(
            model=model,
            url=url,
            api_key=api_key,
            tokenizer_name=tokenizer_name,
            hf_token=hf_token,
            benchmark_kind=benchmark_kind,
            max_vus=max_vus,
            duration=duration,
            warmup=warmup,
            drain=drain,
            rates=rates,
            num_rates=num_rates,
            concurrency=concurrency,
            num_workers=num_workers,
            arrival=arrival,
            on_full=on_full,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            endpoint=endpoint,
            connection=connection,
            timeout=timeout,
            slo=slo,
            seed=seed,
            extra_body=extra_body,
            output=output,
            requests_output=requests_output,
            json_output=json_output,
        )
    )


app.add_typer(_fleet.app, name="fleet")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Raises:
        SystemExit: always; 0 done, 1 failure, 2 misuse or nobody there to inspect, 130 interrupted.
    """
    global _constructor_tokens
    _stdio.hold()
    try:
        head, _constructor_tokens = _argv.split(sys.argv[1:] if argv is None else argv)
        command = next((token for token in head if not token.startswith("-")), None)
        if _constructor_tokens is not None and command != "actor":
            words = f"pulsing {command}" if command else "pulsing"
            raise MisuseError(f"-- means nothing to `{words}`; only `pulsing actor` takes it.")
        head = _argv.normalise(head, typer.main.get_command(app))
        app(args=head, prog_name="pulsing")
    except CliError as error:
        sys.stderr.write(f"Error: {legible(brief(str(error)))}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe went away (`| head`): Python would complain again when it flushes at exit.
        sys.stdout = None
        sys.exit(1)
    except OSError as error:
        # The system refuses what every command needs: a full disk behind stdout, no descriptor left.
        _logging.trace_of(error)
        sys.stdout = None
        _logging.to_stderr(f"Error: {legible(brief(error.strerror or str(error)))}")
        sys.exit(1)


if __name__ == "__main__":
    main()
