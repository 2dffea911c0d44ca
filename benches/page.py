"""Where a bench's page of figures goes."""

import json
import pathlib
from typing import Any


def publish(text: str, run: dict[str, Any], path: pathlib.Path | None) -> None:
    """Prints the page, or writes it to `path` with the figures as JSON beside it."""
    if path is None:
        print(text)
        return
    path.write_text(text)
    path.with_suffix(".json").write_text(json.dumps(run, indent=1) + "\n")
