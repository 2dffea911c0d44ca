"""The `pulsing` command. Nothing here is public API: run the command, or use `pulsing` from Python."""

__all__: list[str] = []
