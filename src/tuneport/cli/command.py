"""Make a command from its inputs and its config: the parameters, the panels of the help, the checks.

A command is a function of its inputs, its config and `json`. Its parameters on the command line are the fields of both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from ..config.options import INPUTS, MACHINE, OUTPUT, SAMPLES, TASK, USUAL, WRITTEN, Config, Declared, Option, flags_of

GROUPS = (INPUTS, USUAL, WRITTEN, SAMPLES, TASK, MACHINE, OUTPUT)  # in the order of the help
METAVARS: dict[Any, str] = {int: "N", float: "X", str: "PATH", bool: " "}  # what stands for a value in the help
PLAIN = (int, float, bool, str)
SILENT = (None, False, 0, inspect.Parameter.empty)  # defaults that say nothing
Run = Callable[..., None]
Check = Callable[[Declared | None, Config], None]

JSON = inspect.Parameter(
    "json",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=USUAL, metavar=" ")
    ],
)


def declared_by(run: Run) -> tuple[type[Declared] | None, type[Config]]:
    """The classes of a command's inputs, if it has any, and of its options: the types of its parameters."""
    types = get_type_hints(run)
    return types.get("inputs"), types["config"]


def command(run: Run, inputs: type[Declared] | None, config: type[Config], check: Check = lambda *_: None) -> Run:
    """Make a function for typer that calls `run(inputs, config, json=...)` after `check`, which needs no heavy library.

    The docstring of `run` is the first line of the help.
    """
    classes = [cls for cls in (inputs, config) if cls is not None]
    declared = [(cls, item, about) for cls in classes for item, about in cls.options() if not about.python]
    declared.sort(key=lambda entry: (not entry[2].argument, GROUPS.index(entry[2].group), entry[2].control))
    parameters = [_parameter(cls, item, about) for cls, item, about in declared]
    usual = sum(about.argument or about.group in (INPUTS, USUAL) for _, _, about in declared)
    parameters.insert(usual, JSON)

    def called(**given: Any) -> None:
        made, read = config.of(**_given(config, given)), None if inputs is None else inputs.of(**_given(inputs, given))
        check(read, made)
        run(*(() if read is None else (read,)), made, json=given["json"])

    called.__name__ = run.__name__
    called.__doc__ = inspect.getdoc(run)
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _parameter(cls: type[Declared], item: Field[Any], about: Option) -> inspect.Parameter:
    kind, many = _kind(cls.value_types()[item.name], about)
    default = inspect.Parameter.empty if item.default is MISSING else None if many else item.default
    if about.parse is not None:
        default = None
    shared: dict[str, Any] = {"help": about.help, "hidden": not about.listed}
    shared["metavar"] = about.metavar or METAVARS.get(kind)
    shared["rich_help_panel"] = None if about.group == INPUTS else about.group  # beside --help
    if about.argument:
        found: Any = typer.Argument(**{**shared, "rich_help_panel": None})
    else:
        found = typer.Option(*flags_of(item, about), **shared, show_default=default not in SILENT)
    kind = list[kind] if many else kind  # type: ignore[valid-type]
    kind = kind | None if default is None else kind
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, found]
    )


def _kind(kind: Any, about: Option) -> tuple[Any, bool]:
    """The type of one value on the command line, and whether it may be given several times."""
    if about.parse is not None:
        return str, about.repeated
    if kind in PLAIN:
        return kind, False
    return str, get_origin(kind) in (tuple, Sequence)


def _given(cls: type[Declared], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values for one class; options that were not given keep their defaults."""
    found = {}
    for item, about in cls.options():
        if about.python or (value := given.get(item.name)) is None or value == []:
            continue
        found[item.name] = tuple(value) if isinstance(value, list) else value
    return found
