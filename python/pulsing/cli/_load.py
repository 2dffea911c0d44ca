"""From `package.module.Class` to the class."""

import contextlib
import importlib
import inspect
import os
import pkgutil
import sys
from types import ModuleType
from typing import Any

from pulsing.cli._errors import CliError, FailureError, MisuseError, nearest
from pulsing.core._shown import shown

# Which extra brings which module; said when an import fails for want of it.
_EXTRAS = {
    "torch": "transformers",
    "transformers": "transformers",
    "accelerate": "transformers",
    "gguf": "transformers",
    "mistralrs": "mistralrs",
    "vllm": "vllm",
}


def load_class(path: str) -> Any:
    """Imports a class by its full path. The working directory counts as a place to import from, after all others.

    Raises:
        MisuseError: the path is none, or nothing is there.
        FailureError: the module is there and cannot be imported.
    """
    module_name, _, class_name = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise MisuseError(
            f"{shown(path)} is no class path: write package.module.Class, for example pulsing.serving.Router."
        )
    # A directory that was removed has nothing to import.
    with contextlib.suppress(FileNotFoundError):
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
    module = _import(module_name)
    try:
        found = getattr(module, class_name)
    except AttributeError:
        names = [name for name in dir(module) if not name.startswith("_")]
        raise MisuseError(
            f"{module_name} has no class {class_name}{_spelled(module_name, class_name, names)}"
        ) from None
    except ImportError as error:
        raise _import_failure(path, error) from error
    return found


def actor_class(found: Any, path: str) -> type[Any]:
    """The plain class behind `found`: an `Actor` subclass, or what `@remote` was put on.

    Raises:
        MisuseError: it is neither.
    """
    from pulsing.core import Actor, ActorClass

    if isinstance(found, ActorClass):
        return found.cls
    if not isinstance(found, type):
        raise MisuseError(f"{path} is no class but a {type(found).__name__}.")
    if not issubclass(found, Actor):
        raise MisuseError(f"{path} is no actor: it must derive from pulsing.core.Actor or carry @pulsing.remote.")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise MisuseError(f"{path} is abstract and cannot be started: it lacks {missing}.")
    return found


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing and (name == missing or name.startswith(missing + ".")):
            raise _no_module(name, missing) from None
        raise _import_failure(name, error) from error
    except SystemExit as error:
        # A script without `if __name__ == "__main__"` runs to its end, which would pass for the end of this command.
        raise FailureError(f"cannot import {name}: it ends the program (sys.exit({error.code}))") from error
    except Exception as error:
        # Importing runs code of the user's; whatever it raises ends here with its own words.
        raise FailureError(f"cannot import {name}: {type(error).__name__}: {error}") from error


def _import_failure(name: str, error: ImportError) -> CliError:
    top = (error.name or "").partition(".")[0]
    text = f"cannot import {name}: {error}"
    if isinstance(error, ModuleNotFoundError) and top in _EXTRAS:
        text += f"\nInstall it with: pip install 'pulsing[{_EXTRAS[top]}]'"
    return FailureError(text)


def _no_module(name: str, missing: str) -> CliError:
    parent_name, _, leaf = missing.rpartition(".")
    siblings: list[str] = []
    if parent_name:
        parent = sys.modules.get(parent_name)
        if parent is not None and not hasattr(parent, "__path__"):
            # `module.Class.Inner` and the like: the part before is a module already.
            return MisuseError(f"{parent_name} is a module, not a package: it has no {leaf}.")
        siblings = [info.name for info in pkgutil.iter_modules(getattr(parent, "__path__", []))]
    else:
        siblings = [info.name for info in pkgutil.iter_modules()]
    hint = _spelled(parent_name, leaf, [n for n in siblings if not n.startswith("_")])
    return MisuseError(f"cannot import {name}: there is no module {missing}{hint}")


def _spelled(parent: str, word: str, names: list[str]) -> str:
    return nearest(f"{parent}.{word}" if parent else word, [f"{parent}.{n}" if parent else n for n in names])
