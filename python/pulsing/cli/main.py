"""Entry point of the `pulsing` command.

What a command does is imported when it runs: `pulsing --help` and `pulsing inspect` load no engine.
"""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from pulsing.cli import _argv, _fleet
from pulsing.cli._errors import CliError, MisuseError

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
BestEffort = Annotated[
    bool,
    typer.Option("--best_effort", help="Show what the reachable nodes say; by default one silent node is a failure."),
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
def actor(
    ctx: typer.Context,
    cls: Annotated[str | None, typer.Argument(metavar="CLASS", help="For example pulsing.serving.Router.")] = None,
    addr: Annotated[
        str | None,
        typer.Option(
            "--addr", metavar="HOST:PORT", help="Where to listen. Default: a free port that the seeds can reach."
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="A,B", help="host:port of nodes to join, separated by commas.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", help="Name the actor serves under. Default: worker, or what its class says (a Router: router)."
        ),
    ] = None,
    join_timeout: Annotated[
        str | None,
        typer.Option("--join_timeout", metavar="SECONDS", help="How long to wait for the seeds. Default: 0, for ever."),
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
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="NAME", help="Name of the cluster. Default: default.")
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option(
            "--insecure/--no_insecure",
            help="Take unauthenticated plaintext peers from other hosts. Needed on both sides; trusted networks only.",
        ),
    ] = None,
    observe: Annotated[
        bool | None,
        typer.Option("--observe/--no_observe", help="Answer `pulsing inspect` on the node's port. Default: yes."),
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option("--log_level", metavar="LEVEL", help="error, warn, info, debug or trace. Default: info."),
    ] = None,
    log_format: Annotated[
        str | None, typer.Option("--log_format", metavar="FORMAT", help="text or json. Default: text.")
    ] = None,
    config: Annotated[str | None, typer.Option("--config", metavar="FILE", help="TOML file of these settings.")] = None,
    show_help: Annotated[
        bool, typer.Option("--help", help="Show this message, and the constructor's parameters of CLASS.")
    ] = False,
) -> None:
    from pulsing.cli import _actor

    if show_help:
        typer.echo(ctx.get_help())
        if cls is not None:
            typer.echo("\n" + _actor.class_help(cls))
        return
    if cls is None:
        raise MisuseError("CLASS is missing, as in: pulsing actor pulsing.serving.Router --addr 0.0.0.0:8000")
    flags: dict[str, Any] = {
        "addr": addr,
        "seeds": seeds,
        "cluster": cluster,
        "join_timeout": join_timeout,
        "insecure": insecure,
        "observe": observe,
        "log_level": log_level,
        "log_format": log_format,
    }
    options = [_argv.canonical(spelling) for param in ctx.command.params for spelling in param.opts]
    _actor.run(cls, name, flags, config, _constructor_tokens or [], define or [], options)


@inspect_app.callback(invoke_without_command=True)
def _inspect_root(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        raise MisuseError(f"a command is missing\n{ctx.get_usage()}\nTry 'pulsing inspect --help'.")


@inspect_app.command("cluster", help="Members of the cluster as the first seed that answers sees them.")
def inspect_cluster(
    seeds: Seeds = None, timeout: Timeout = 10.0, best_effort: BestEffort = False, json_output: Json = False
) -> None:
    from pulsing.cli import _inspect

    _inspect.cluster(_inspect.Source(seeds, timeout, best_effort), json_output)


@inspect_app.command(
    "actors", help="Actors of one node and the names it knows (--endpoint), or of all nodes (--seeds)."
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
    best_effort: BestEffort = False,
    json_output: Json = False,
) -> None:
    from pulsing.cli import _inspect

    view = _inspect.View(top, filter_, all_actors, detailed, json_output)
    _inspect.actors(_inspect.Source(seeds, timeout, best_effort, endpoint), view)


@inspect_app.command("metrics", help="Counters of every node.")
def inspect_metrics(
    seeds: Seeds = None,
    raw: Annotated[bool, typer.Option("--raw", help="Print the Prometheus text as it came.")] = False,
    timeout: Timeout = 10.0,
    best_effort: BestEffort = False,
    json_output: Json = False,
) -> None:
    from pulsing.cli import _inspect

    _inspect.metrics(_inspect.Source(seeds, timeout, best_effort), raw, json_output)


@inspect_app.command("watch", help="Print what changes in the cluster until Ctrl-C.")
def inspect_watch(
    seeds: Seeds = None,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.05, help="Time between two looks.")
    ] = 1.0,
    kind: Annotated[str, typer.Option("--kind", help="all, cluster or actors.")] = "all",
    max_rounds: Annotated[int | None, typer.Option("--max_rounds", min=1, help="Stop after this many looks.")] = None,
    timeout: Timeout = 10.0,
) -> None:
    from pulsing.cli import _inspect

    _inspect.watch(_inspect.Source(seeds, timeout, best_effort=True), interval, kind, max_rounds)


_LATER = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_LATER, help="Load-test an OpenAI-compatible server (comes in the next version).")
def bench() -> None:
    raise MisuseError("`pulsing bench` comes in the next version; this one cannot measure yet.")


app.add_typer(_fleet.app, name="fleet")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Raises:
        SystemExit: always; 0 done, 1 failure, 2 misuse, 130 interrupted.
    """
    global _constructor_tokens
    try:
        head, _constructor_tokens = _argv.split(sys.argv[1:] if argv is None else argv)
        command = next((token for token in head if not token.startswith("-")), None)
        if _constructor_tokens is not None and command != "actor":
            words = f"pulsing {command}" if command else "pulsing"
            raise MisuseError(f"-- means nothing to `{words}`; only `pulsing actor` takes it.")
        if command != "bench":
            head = _argv.normalise(head, typer.main.get_command(app))
        app(args=head, prog_name="pulsing")
    except CliError as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe went away (`| head`): Python would complain again when it flushes at exit.
        sys.stdout = None
        sys.exit(1)


if __name__ == "__main__":
    main()
