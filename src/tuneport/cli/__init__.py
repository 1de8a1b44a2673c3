"""The command line: parse, call one library function, print. The only importer of typer and rich.

Results go to stdout (`--json`: one JSON object and nothing else), progress to stderr. Exit codes: 0 done,
1 a TuneportError (one clear line), 2 wrong usage, 3 harm with --fail-on-harm, 128 + N stopped by signal N (Ctrl-C:
130). Heavy imports happen inside the commands, so that help answers at once.
"""

from __future__ import annotations

import inspect
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..config import UpgradeInputs
from ..config.options import Config, Declared
from ..errors import OptionError, TuneportError, brief, lacks_memory
from .command import Run, command, declared_by
from .commands import apply, demo, distill, evaluate, extract, merge, methods, plan, transfer, upgrade
from .terminal import fail, say, tell

LESS_MEMORY = (
    'Pass a `memory_budget`, a smaller `batch_size` or `max_tokens`, or `dtype="bfloat16"`, if the command has them.'
)

USAGE = 2  # the exit code of a wrong command line
CLEANUP = 5.0  # seconds in which further signals are ignored: schedulers send several, and removing files takes time


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Context in which Ctrl-C, a closed terminal (SIGHUP) and `kill` (SIGTERM) raise a KeyboardInterrupt.

    It has the number of the signal, and temporary files and locks are removed in one way.
    """
    from ..io.output import handled

    last = -CLEANUP

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last >= CLEANUP:
            last = time.monotonic()
            raise KeyboardInterrupt(number)

    with handled(stop):
        yield


class Commands(TyperGroup):
    """All commands. An interrupt is reported here: outside, typer has already turned it into a silent exit."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with stopped_by_signals():
                return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            tell("interrupted; no partial output remains")
            sys.exit(128 + (stop.args[0] if stop.args else signal.SIGINT))


app = typer.Typer(
    name="tuneport",
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
DEBUG = False

FIRST, MORE = "Start with these", "More commands"
PORT = "--source OLD --finetuned LORA --target NEW --data D"

# In the order of the help: the function and its usual calls; "..." is the first call.
COMMANDS: dict[Run, tuple[str, ...]] = {
    upgrade: (f"upgrade {PORT} --out OUT", "... --routes copy,port --time 10m", "upgrade --list MANY.jsonl --out DIR"),
    plan: (f"plan {PORT}", "... --layers", "... --shapes-only --memory-budget 24GiB"),
    evaluate: (
        "evaluate OUT --data D",
        "evaluate OLD NEW OUT --data D --by-class",
        "evaluate OUT --ask 'What is it?'",
    ),
    transfer: (f"transfer {PORT} --out O", "... --as adapter --rank 16", "... --scale safe --evaluate"),
    distill: ("distill --finetuned TUNED --target NEW --data D --out O", "... --lora 16", "... --steps 1000 --resume"),
    extract: ("extract OLD TUNED -o tau.safetensors", "... --exclude 'classifier.*'", "... --overwrite"),
    apply: ("apply tau.safetensors OLD -o OUT", "... --scale 0.7", "... --scale -1"),
    merge: (
        "merge ONE TWO --base OLD --as model -o BOTH",
        "... --rule ties --density 0.2",
        "... --weights 1,0.5 --exclude 'classifier.*'",
    ),
    methods: ("methods", "methods --json"),
    demo: ("demo", "demo --out FOLDER", "demo --overwrite --seed 1"),
}
START = (upgrade, plan, evaluate)


def check(inputs: Declared | None, config: Config) -> None:
    from ..checks import check_command

    if isinstance(inputs, UpgradeInputs):
        if inputs.list_ is not None:
            return  # each line is checked as one upgrade
        inputs = inputs.one()
    check_command(inputs, config)


for run, calls in COMMANDS.items():
    lines = "\n".join(call if call.startswith("...") else f"tuneport {call}" for call in calls)
    shown = f"{inspect.getdoc(run)}\n\n\b\n{lines}"
    app.command(help=shown, rich_help_panel=FIRST if run in START else MORE)(command(run, *declared_by(run), check))


@cache
def parameter_names() -> frozenset[str]:
    """The parameters of all commands, by their names in Python."""
    classes = [cls for run in COMMANDS for cls in declared_by(run) if cls is not None]
    return frozenset(item.name.rstrip("_") for cls in classes for item, about in cls.options() if not about.python)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"tuneport {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Port a fine-tune to a new base model.

    [bold]Start here:[/bold] tuneport demo
    """
    del version
    global DEBUG
    DEBUG = debug


def main() -> None:
    """Entry point: run a command and turn errors into one clear line and an exit code."""
    try:
        app()
    except Exception as error:
        if DEBUG:
            raise
        if lacks_memory(error):
            said, mark, _ = brief(error).partition(" is free")
            fail("OutOfMemoryError", f"{said}{mark}. {LESS_MEMORY}")
        advice = " (unexpected: run tuneport --debug ... for the traceback and report it)"
        text = f"{error}{'' if isinstance(error, TuneportError) else advice}"
        fail(type(error).__name__, text, USAGE if isinstance(error, OptionError) else 1)
