"""`inlay`: finds the verb, runs it, and turns mistakes into a message and exit code 2."""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
from importlib import import_module
from typing import Any

import click

from inlay.cli.names import as_flags
from inlay.errors import ELSEWHERE, InlayError, nearest
from inlay.storage.files import is_full
from inlay.storage.plain_text import printable

VERBS = {
    "train": "Train one inlay, a head, or the whole host; or several tasks together.",
    "finish": "Make an interrupted run's best state so far its result.",
    "fuse": "Learn to combine trained inlays for a target task.",
    "eval": "Evaluate a run or an inlay on a split or a file.",
    "predict": "Predict for texts given as arguments, in a file or on stdin.",
    "serve": "Serve runs, inlays and fusions of one host over HTTP.",
    "inspect": "Describe a run or an inlay.",
    "prune": "Remove the members that a fusion does not listen to.",
    "collapse": "Turn a fusion into one plain inlay with its mean weights.",
    "merge": "Turn a mixture into a plain inlay.",
    "export": "Write an inlay in the format of peft or adapters.",
    "import": "Read a checkpoint of adapters or peft.",
    "params": "Count the parameters that each method would train on a host.",
    "ls": "List methods, tasks, recipes, families or runs.",
    "validate": "Check a config and its rows, and estimate the cost of training.",
    "study": "Run a grid of trainings and make its tables and figures.",
    "demo": "Train, fuse and compare on real data, within minutes.",
}
"""Verb → one line; the command is `command` in the module of that name here."""
NO_WORDS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""How newer versions of click say that no verb was given; its message is the help."""


class Verbs(click.Group):
    """Loads a verb's module only when it is asked for."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module = "import_" if name == "import" else name  # a word of Python's own
        command: click.Command = import_module(f"inlay.cli.{module}").command
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise click.UsageError(f"no verb {args[0]!r}.{nearest(args[0], VERBS)}", context)
        return super().resolve_command(context, args)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="inlay")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def inlay(debug: bool) -> None:
    """Small trainable pieces set into a frozen transformer, one set per task.

    \b
    Example:
      inlay train --host bert-base-uncased --task rte --out runs/rte
      inlay predict runs/rte "It rains." "The street is wet."
    """


def run(given: list[str]) -> None:
    """Run the verb that the words name, and leave with its exit code; `inlay.cli.main` says which there are."""
    debug = "--debug" in given
    _calm()
    _speak_anyway()
    try:
        code = inlay.main([word for word in given if word != "--debug"], prog_name="inlay", standalone_mode=False)
        if code:  # a verb that left early says so by its exit code
            sys.exit(code)
    except click.ClickException as error:
        print(printable(_usage(error)), file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, click.exceptions.Abort):
        _leave("stopped.", 130, debug)
    except InlayError as error:
        _leave(f"error: {as_flags(str(error), _verb(given))}", 2, debug)
    except (RecursionError, MemoryError) as error:
        _leave(f"error: what was given is too large or nested too deeply ({type(error).__name__})", 2, debug)
    except RuntimeError as error:
        if not re.search("allocate memory|out of memory|not enough memory", str(error)):
            raise
        _leave(f"error: there is not enough memory: {str(error).splitlines()[0]}", 2, debug)
    except OSError as error:
        what = f"the disk is full; what was saved before is whole ({error})" if is_full(error) else str(error)
        _leave(f"error: {what}", 2, debug)


def _verb(given: list[str]) -> click.Command | None:
    """The verb among the words; of `study`, the one after it."""
    at = next((i for i, word in enumerate(given) if word in VERBS), None)
    found = None if at is None else inlay.get_command(click.Context(inlay), given[at])
    if at is not None and isinstance(found, click.Group):
        return next((found.commands[word] for word in given[at + 1 :] if word in found.commands), found)
    return found


def _usage(error: click.ClickException) -> str:
    """What click says of a mistake in the words: the usage first, where it knows the verb."""
    if isinstance(error, NO_WORDS):
        return error.format_message()
    context = getattr(error, "ctx", None)
    usage = f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n\n" if context is not None else ""
    said = error.format_message()
    if isinstance(error, click.NoSuchOption) and context is not None:
        here = ELSEWHERE.get(error.option_name.lstrip("-").replace("-", "_"))
        flag = next((param.opts[0] for param in context.command.params if param.name == here), None)
        said = said if flag is None else f"No such option '{error.option_name}'. Did you mean '{flag}'?"
    return f"{usage}Error: {said}"


def _leave(message: str, code: int, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(printable(message), file=sys.stderr)
    sys.exit(code)


def _speak_anyway() -> None:
    """A terminal that cannot show a letter gets its escape, and what has no stdin or stdout still runs."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _calm() -> None:
    """Before torch and transformers are imported: no spinning threads, no chatter."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
