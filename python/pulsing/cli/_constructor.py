"""A class's constructor parameters, as options after `--`."""

import builtins
import dataclasses
import inspect
import json
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pulsing.cli._argv import canonical
from pulsing.cli._errors import FailureError, MisuseError, nearest
from pulsing.core import _convert
from pulsing.core._settings import Setting, Size
from pulsing.core._shown import shown

_EMPTY = inspect.Parameter.empty


@dataclasses.dataclass(frozen=True)
class Param:
    """One constructor parameter."""

    name: str
    annotation: Any
    default: Any
    doc: str
    handed_on: bool = False
    """Taken by `**kwargs` for something else, which has too many of them to list."""

    @property
    def required(self) -> bool:
        return self.default is _EMPTY


@dataclasses.dataclass(frozen=True)
class Constructor:
    """What a class can be started with. `extra` is set when it takes any further keyword.

    Such a class may say which keywords those are (`__pulsing_keywords__`, a classmethod: name to annotation). It is
    asked only when it is to be started, as the answer may need what is not installed. A class with a table of settings
    (`__pulsing_settings__`, rows as in `pulsing.core._settings`) has their types, defaults and meanings from there.
    """

    class_name: str
    params: dict[str, Param]
    extra: bool
    keywords: Callable[[], Mapping[str, Any]] | None = None


def constructor_of(cls: type[Any], class_name: str) -> Constructor:
    """Reads signature, annotations and docstring of a class."""
    init = cls.__init__
    if init is object.__init__:
        return Constructor(class_name, {}, extra=False)
    signature = inspect.signature(init)
    hints = _hints(cls, init)
    docs = _doc_lines(inspect.getdoc(cls) or "") | _doc_lines(inspect.getdoc(init) or "")
    params: dict[str, Param] = {}
    extra = False
    for position, parameter in enumerate(signature.parameters.values()):
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = True
        elif position and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            annotation = hints.get(parameter.name, Any)
            if (
                annotation is Any
                and parameter.annotation is _EMPTY
                and type(parameter.default) in (bool, int, float, str)
            ):
                annotation = type(parameter.default)
            params[parameter.name] = Param(parameter.name, annotation, parameter.default, docs.get(parameter.name, ""))
    if table := getattr(cls, "__pulsing_settings__", ()):
        others = {setting.name: _of_setting(setting) for setting in table}
        return Constructor(class_name, {**params, **others}, extra=False)
    return Constructor(class_name, params, extra, getattr(cls, "__pulsing_keywords__", None) if extra else None)


def _of_setting(setting: Setting) -> Param:
    # A size is a number, or text that the setting reads itself.
    annotation = int | str if setting.annotation is Size else setting.annotation
    unit = f" [{setting.unit}]" if setting.unit else ""
    doc = f"{setting.doc[0].upper()}{setting.doc[1:]}{unit}. Variable: {setting.env}.".replace("`", "")
    return Param(setting.name, annotation, setting.default, doc)


def arguments(
    constructor: Constructor, tokens: Sequence[str], defines: Sequence[str], actor_options: Collection[str]
) -> dict[str, Any]:
    """Keyword arguments for the constructor.

    Args:
        constructor: what the class takes.
        tokens: the command line after `--`; wins over `defines`.
        defines: values of `-D`, each `actor.extra_kwargs=JSON`.
        actor_options: canonical names of the options before `--`, for a better error.

    Raises:
        MisuseError: unknown, missing, repeated or unreadable.
        FailureError: what the class is built on is not installed.
    """
    constructor = _with_keywords(constructor)
    values: dict[str, Any] = {}
    for name, value in _defined(defines).items():
        key = canonical(name)
        param = _param(constructor, key, f"-D actor.extra_kwargs: {name}", actor_options)
        try:
            values[key] = _convert.from_json(param.annotation, value) if param else value
        except _convert.ConvertError as error:
            raise MisuseError(f"-D actor.extra_kwargs: {name}: {error}.") from None
    for key, (spelling, texts) in _options(constructor, tokens, actor_options).items():
        param = _param(constructor, key, spelling, actor_options)
        annotation = param.annotation if param else Any
        try:
            values[key] = _value(annotation, spelling, texts)
        except _convert.ConvertError as error:
            raise MisuseError(
                f"{spelling}: {error}. {constructor.class_name} takes it as {_convert.describe(annotation)}."
            ) from None
    missing = [param.name for param in constructor.params.values() if param.required and param.name not in values]
    if missing:
        wanted = " ".join(f"--{name} VALUE" for name in missing)
        raise MisuseError(
            f"{constructor.class_name} needs {', '.join('--' + name for name in missing)}: "
            f"add it after --, as in: -- {wanted}\n{_parameter_list(constructor)}"
        )
    return values


def _with_keywords(constructor: Constructor) -> Constructor:
    """The constructor with the keywords that its class names as parameters of their own."""
    if constructor.keywords is None:
        return constructor
    try:
        named = constructor.keywords()
    except ImportError as error:
        raise FailureError(str(error)) from error
    params = {name: Param(name, annotation, None, "", handed_on=True) for name, annotation in named.items()}
    return dataclasses.replace(constructor, params=params | constructor.params, extra=False)


def help_text(constructor: Constructor) -> str:
    """The part of `pulsing actor CLASS --help` about the class."""
    title = f"Constructor parameters of {constructor.class_name} (after --):"
    if not constructor.params and not constructor.extra:
        return f"{title} none."
    lines = [title]
    for param in constructor.params.values():
        default = "required" if param.required else f"default: {_show(param.default)}"
        lines.append(f"  --{param.name} <{_convert.describe(param.annotation)}>  ({default})")
        if param.doc:
            lines.extend(textwrap.wrap(param.doc, 96, initial_indent=" " * 6, subsequent_indent=" " * 6))
    if constructor.extra:
        lines.append("  --<any other> <text or JSON>")
    return "\n".join(lines)


def _show(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str | bool | int | float) or value is None else repr(value)


def _hints(cls: type[Any], init: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(init, include_extras=True)
    except (NameError, TypeError, SyntaxError, AttributeError):
        pass
    # One annotation that cannot be evaluated (a name imported for type checkers only) must not cost the others theirs.
    scope = {**vars(builtins), **vars(typing), **vars(sys.modules[init.__module__]), **getattr(init, "__globals__", {})}
    hints: dict[str, Any] = {}
    for name, annotation in getattr(init, "__annotations__", {}).items():
        try:
            hints[name] = eval(annotation, scope, dict(vars(cls))) if isinstance(annotation, str) else annotation
        except (NameError, TypeError, SyntaxError, AttributeError):
            hints[name] = Any
    return hints


def _doc_lines(doc: str) -> dict[str, str]:
    """Parameter texts from a docstring's `Args:` section."""
    section = re.search(r"^(?:Args|Arguments|Parameters):\s*\n((?:[ \t]+.*\n?|\s*\n)+)", doc, re.MULTILINE)
    if section is None:
        return {}
    body = textwrap.dedent(section.group(1))
    docs: dict[str, str] = {}
    for match in re.finditer(r"^(\w+)(?:\s*\([^)]*\))?:[ \t]*((?:.*)(?:\n[ \t]+.*)*)", body, re.MULTILINE):
        docs[match.group(1)] = " ".join(match.group(2).split())
    return docs


def _defined(defines: Sequence[str]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for define in defines:
        key, equals, text = define.partition("=")
        if key != "actor.extra_kwargs":
            raise MisuseError(
                f"-D knows no {shown(key)}{nearest(key, ['actor.extra_kwargs'])}\n"
                "Write -D actor.extra_kwargs='{\"key\": 1}'."
            )
        try:
            value = json.loads(text) if equals else None
        except json.JSONDecodeError as error:
            raise MisuseError(f"-D actor.extra_kwargs: {shown(text)} is not JSON: {error}.") from None
        except RecursionError:
            raise MisuseError(f"-D actor.extra_kwargs: {shown(text)} is nested too deeply.") from None
        if not isinstance(value, dict):
            raise MisuseError(f"-D actor.extra_kwargs takes a JSON object of constructor arguments, not {shown(text)}.")
        merged.update(value)
    return merged


def _options(
    constructor: Constructor, tokens: Sequence[str], actor_options: Collection[str]
) -> dict[str, tuple[str, list[str | None]]]:
    """Canonical name -> (spelling as typed, texts; None stands for a bare flag)."""
    found: dict[str, tuple[str, list[str | None]]] = {}
    at = 0
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if not token.startswith("--") or token == "--":
            raise MisuseError(
                f"unexpected {shown(token)} after --: constructor arguments are written --key value or --key=value."
                f"\n{_parameter_list(constructor)}"
            )
        spelling, equals, text = token.partition("=")
        value: str | None = text if equals else None
        if not equals and at < len(tokens) and not tokens[at].startswith("--"):
            value = tokens[at]
            at += 1
        key = canonical(spelling)
        _param(constructor, key, spelling, actor_options)
        found.setdefault(key, (spelling, []))[1].append(value)
    return found


def _param(constructor: Constructor, key: str, spelling: str, actor_options: Collection[str]) -> Param | None:
    """The parameter, or None for one taken by `**kwargs`."""
    param = constructor.params.get(key)
    if param is not None or constructor.extra:
        return param
    text = f"{constructor.class_name} has no constructor parameter {spelling}{nearest(key, constructor.params)}"
    if key in actor_options:
        text += f"\n{spelling} is an option of `pulsing actor`: put it before --."
    raise MisuseError(f"{text}\n{_parameter_list(constructor)}")


def _parameter_list(constructor: Constructor) -> str:
    own = [f"--{name}" for name, param in constructor.params.items() if not param.handed_on]
    others = len(constructor.params) - len(own)
    more = f", and {others} more that it hands on" if others else ""
    return f"Parameters of {constructor.class_name}: {', '.join(own) or 'none'}{more}."


def _value(annotation: Any, spelling: str, texts: list[str | None]) -> Any:
    if texts == [None]:
        if _convert.accepts_flag(annotation):
            return True
        raise MisuseError(f"{spelling} needs a value ({_convert.describe(annotation)}).")
    given = [text for text in texts if text is not None]
    if len(given) != len(texts):
        raise MisuseError(f"{spelling} is given several times, once without a value.")
    if len(given) == 1:
        return _convert.from_text(annotation, given[0])
    if not _convert.is_sequence(annotation):
        raise MisuseError(f"{spelling} is given {len(given)} times; it takes one {_convert.describe(annotation)}.")
    return _convert.from_text(annotation, ",".join(given))
