"""The command by which a ready cell joins a Pulsing cluster."""


def engine_worker_command(seeds: str, name: str, url: str) -> tuple[str, ...]:
    """An EngineWorker in front of an engine that already answers.

    Secrets and the cluster's name travel as PULSING_* variables of the launcher's environment.

    Args:
        seeds: host:port of nodes to join, separated by commas.
        name: name to serve under.
        url: where the engine answers.
    """
    return (
        *("pulsing", "actor", "pulsing.serving.EngineWorker"),
        *("--seeds", seeds, "--name", name),
        *("--", "--url", url),
    )
