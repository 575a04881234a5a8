"""Flags of a command from the options model that owns them.

A job is an options model and a function. The model already says every option's name, type, default and
meaning, so the command line is derived from it: one place to change, and no help that drifts from what runs.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

PLAIN = (str, int, float, bool, Path)


class UsageError(ValueError):
    """A command was called with values that do not fit."""


def flags_of(model: type[BaseModel], arguments: Iterable[str] = ()) -> list[inspect.Parameter]:
    """Keyword parameters, annotated for typer, one a field of `model`.

    Args:
        model: options of a job; every field has a description.
        arguments: fields that are given by place instead of by `--name`.
    """
    return [_parameter(name, field, name in set(arguments)) for name, field in model.model_fields.items()]


def with_flags(
    function: Callable[..., None], model: type[BaseModel], arguments: Iterable[str] = ()
) -> Callable[..., None]:
    """`function(options, **rest)` as a callback: flags are the fields of `model` and its other parameters.

    Raises (from the callback):
        UsageError: the values do not make a valid `model`; each problem names its flag.
    """
    hints = get_type_hints(function, include_extras=True)
    rest = [
        p.replace(annotation=hints[p.name])
        for p in inspect.signature(function).parameters.values()
        if p.name != "options"
    ]
    by_place = set(arguments)
    tables = [name for name, field in model.model_fields.items() if get_origin(field.annotation) is dict]
    numbers = [name for name, field in model.model_fields.items() if _holds_numbers(field.annotation)]
    lists = [name for name, field in model.model_fields.items() if _takes_commas(field.annotation)]

    def callback(**given: Any) -> None:
        extra = {p.name: given.pop(p.name) for p in rest}
        values = {name: value for name, value in given.items() if value is not None and value != []}
        values |= {name: _pairs(name, values[name]) for name in tables if name in values}
        values |= {name: yaml.safe_load(values[name]) for name in numbers if name in values}
        values |= {name: ",".join(values[name]).split(",") for name in lists if name in values}
        try:
            options = model.model_validate(values)
        except ValidationError as error:
            raise UsageError("\n".join(_problem(item, by_place) for item in error.errors())) from None
        function(options, **extra)

    fields = flags_of(model, arguments)
    parameters = sorted([*fields, *rest], key=lambda p: p.default is not inspect.Parameter.empty)
    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    callback.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    callback.__annotations__ = {p.name: p.annotation for p in keyword_only}
    callback.__name__, callback.__doc__ = function.__name__, function.__doc__
    return callback


def _parameter(name: str, field: FieldInfo, by_place: bool) -> inspect.Parameter:
    kind, several = _flag_type(field.annotation)
    required = field.is_required()
    default = None if required else field.get_default(call_default_factory=True)
    text = field.description or ""
    if by_place:
        info: Any = typer.Argument(help=text, metavar=name.upper())
    else:
        info = typer.Option(_flag(name, kind), help=text, show_default=_shown(default) or False)
    annotation: Any = list[kind] if several else kind  # type: ignore[valid-type]
    if not required:
        annotation = annotation | None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[annotation, info],
        default=inspect.Parameter.empty if required else None,
    )


def _flag(name: str, kind: Any) -> str:
    dashed = name.replace("_", "-")
    return f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}"


def _shown(default: Any) -> str:
    if default is None or default in ((), []):
        return ""
    return " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)


def _flag_type(annotation: Any) -> tuple[Any, bool]:
    """(type that typer parses, whether the flag may be repeated); what typer cannot parse stays text."""
    if get_origin(annotation) in (Union, types.UnionType):
        choices = [part for part in get_args(annotation) if part is not type(None)]
        return _flag_type(choices[0]) if len(choices) == 1 else (str, False)
    if get_origin(annotation) is Annotated:
        return _flag_type(get_args(annotation)[0])
    fixed = get_origin(annotation) is tuple and Ellipsis not in get_args(annotation)
    if get_origin(annotation) in (list, tuple) and not fixed:
        item = str if _takes_commas(annotation) else get_args(annotation)[0]
        return (item if item in PLAIN else str), True
    if get_origin(annotation) is dict:
        return str, True
    if get_origin(annotation) is Literal:
        return (annotation if all(isinstance(v, str) for v in get_args(annotation)) else str), False
    return (annotation if fixed or annotation in PLAIN else str), False


def _holds_numbers(annotation: Any) -> bool:
    """Whether a flag chooses among values that are not all text, which typer does not parse."""
    if get_origin(annotation) in (Union, types.UnionType):
        return any(_holds_numbers(part) for part in get_args(annotation))
    return get_origin(annotation) is Literal and not all(isinstance(v, str) for v in get_args(annotation))


def _takes_commas(annotation: Any) -> bool:
    """Whether a list may be written `1,2,3`, besides repeating its flag: no item can hold a comma itself."""
    if get_origin(annotation) not in (list, tuple):
        return False
    item = get_args(annotation)[0]
    return item in (int, float) or get_origin(item) is Literal


def _pairs(name: str, texts: list[str]) -> dict[str, Any]:
    """`["a=1", "b=false"]` as a table; values are read as YAML."""
    split = [text.partition("=") for text in texts]
    wrong = [text for text, (_, mark, _) in zip(texts, split, strict=True) if not mark]
    if wrong:
        raise UsageError(f"--{name.replace('_', '-')}: expected KEY=VALUE, found {wrong[0]!r}")
    return {key: yaml.safe_load(value) for key, _, value in split}


def _problem(item: Any, by_place: set[str]) -> str:
    if not item["loc"]:
        return str(item["msg"])
    name = str(item["loc"][0])
    flag = name.upper() if name in by_place else f"--{name.replace('_', '-')}"
    return f"{flag}: {item['msg']}, found {item['input']!r}"
