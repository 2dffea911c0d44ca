"""`${...}` in texts of a fleet file: the only names a command written in YAML can use."""

import re
from collections.abc import Mapping

from pulsing.fleet._model import LaunchCommandContext

# The last alternative is a slot that never ends, or holds another one.
_SLOT = re.compile(r"\$\$|\$\{([^{}]*)\}|\$\{")
KNOWN = (
    "${host}, ${port.NAME}, ${addr.NAME}, ${url.NAME}, ${spec.POOL.PORT}, ${spec_urls.POOL.PORT}, ${cell}, ${worker}, "
    "${gpus}; $$ is a dollar sign"
)


def fill(text: str, context: LaunchCommandContext, extra: Mapping[str, str] | None = None) -> str:
    """The text with its slots filled.

    Args:
        text: may hold slots.
        context: the worker's.
        extra: further slots by name.

    Raises:
        ValueError: a slot that names nothing.
    """

    def value(match: re.Match[str]) -> str:
        if match.group(0) == "$$":
            return "$"
        slot: str | None = match.group(1)
        if slot is None:
            raise ValueError(f"{text!r} has a ${{ without its }}; known are {KNOWN}")
        if extra and slot in extra:
            return extra[slot]
        return _value(slot, context)

    return _SLOT.sub(value, text)


def _value(slot: str, context: LaunchCommandContext) -> str:
    if slot == "cell":
        return str(context.cell_index)
    if slot == "worker":
        return str(context.worker_in_cell_index)
    if slot == "gpus":
        return ",".join(map(str, context.gpu_ids))
    if slot == "host" and context.self_addrs:
        return next(iter(context.self_addrs.values())).host
    kind, _, rest = slot.partition(".")
    if kind in ("port", "addr", "url") and rest:
        own = context.own(rest)
        return {"port": str(own.port), "addr": own.addr, "url": own.url}[kind]
    if kind in ("spec", "spec_urls") and "." in rest:
        # A pool's name may hold dots, a port's hardly ever does.
        pool, _, port = rest.rpartition(".")
        return ",".join(addr.addr if kind == "spec" else addr.url for addr in context.all_of(pool, port))
    raise ValueError(f"${{{slot}}} names nothing; known are {KNOWN}")
