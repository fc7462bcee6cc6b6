"""The terminal, for all commands: checks of flag values, safe printing, logging, and exit codes."""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import errno
import functools
import io
import json
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO, cast

import click

from torchport.errors import BadValueError, OutputError, StoppedError, TorchportError, printable
from torchport.files.folder import refused
from torchport.processes import current_folder, hosts

log = logging.getLogger("torchport")
AGAIN = 0.05
"""Seconds until a lost Ctrl-C is sent again: time for Python to leave the callback that lost it."""


class Command(click.Command):
    """A click command that checks the values of all its flags before it runs."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses arguments as click does, but checks the values as the user wrote them: click changes an empty path."""
        args_as_written = list(args)
        rest = super().parse_args(ctx, args)  # --help ends here
        values, _, _ = self.make_parser(ctx).parse_args(args_as_written)
        for option in self.params:
            if isinstance(option, click.Option) or isinstance(option.type, click.Path):
                given = values.get(str(option.name))
                for value in given if isinstance(given, list | tuple) else [given]:
                    if isinstance(value, str):
                        _check_value(option, value)
        if current_folder() is None:
            raise BadValueError("the current folder", "It was removed", "Run cd, to a folder that is there")
        return rest


#: Returns a decorator that turns a function into a `Command` of a name.
command: Callable[[str], Callable[[Callable[..., None]], click.Command]] = functools.partial(click.command, cls=Command)


class Group(click.Group):
    """A click group whose commands and groups are those of this module."""

    command_class = Command
    group_class = type

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command. If it raises and -v is given, prints the traceback of the error's cause first."""
        try:
            return super().invoke(ctx)
        except TorchportError as error:
            # Only the outermost group prints it.
            trace = error.trace or (error.__cause__ and "".join(traceback.format_exception(error.__cause__)))
            if ctx.parent is None and trace and (ctx.params.get("verbose") or log.isEnabledFor(logging.DEBUG)):
                complain(_escaped_lines(trace.rstrip()))
            raise


#: Returns a decorator that turns a function into a `Group` of a name.
group: Callable[[str], Callable[[Callable[..., None]], click.Group]] = functools.partial(click.group, cls=Group)


def _check_value(option: click.Parameter, value: str) -> None:
    """Raises if no command could use a value of a flag or path argument: not Unicode, empty, or no possible path."""
    is_flag = isinstance(option, click.Option)
    kind = option.metavar or ""
    name = max(option.opts, key=len) if is_flag else option.human_readable_name
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadValueError(name, f"Character {error.start + 1} is not Unicode text", "Write it as UTF-8") from error
    if not value and kind != "TEXT":
        remedy = "Write a value, or leave the flag out" if is_flag else "Write a value"
        raise BadValueError(f"{name} ''", "It is empty", remedy)
    if "FILE" not in kind and "DIR" not in kind and not isinstance(option.type, click.Path):
        return
    try:
        Path(value).stat()
    except (FileNotFoundError, NotADirectoryError):
        return  # whether the file must exist depends on the command
    except OSError as error:
        raise refused(name, value, error) from error


def say(text: str | Iterable[str]) -> None:
    """Prints a text, or a list of lines. Control characters are escaped, and in a list also line breaks in an item."""
    lines = text if isinstance(text, str) else "\n".join(line.replace("\n", r"\n") for line in text)
    click.echo(_escaped_lines(lines))


def say_json(data: Any) -> None:
    """Prints data as JSON to standard output."""
    say(json.dumps(data, indent=2))


@dataclasses.dataclass(frozen=True)
class Answer:
    """The output of a command, as JSON data and as lines of text, and its exit code."""

    data: Any
    lines: list[str]
    exit_code: int = 0

    def say(self, as_json: bool) -> None:
        """Prints the data as JSON, or else the lines."""
        if as_json:
            say_json(self.data)
        else:
            say(self.lines)


def _escaped_lines(text: str) -> str:
    """Returns a text with its control characters escaped, but for line breaks: an ESC becomes `\\x1b`."""
    return "\n".join(printable(line) for line in text.split("\n"))


class _Formatter(logging.Formatter):
    """Escapes control characters in log lines, as from file names; adds `seconds` since the command began."""

    def format(self, record: logging.LogRecord) -> str:
        record.seconds = record.relativeCreated / 1000
        return _escaped_lines(super().format(record))


def log_to_stderr(quiet: bool = False, verbose: bool = False) -> None:
    """Sends log lines to standard error: errors if `quiet`, else also torchport's, and if `verbose` also upstream's.

    A line begins with the seconds since the start, unless standard error is a terminal.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(message)s" if sys.stderr.isatty() else "%(seconds)6.1f s  %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO if verbose else logging.ERROR)
    if not verbose:
        warnings.simplefilter("ignore")  # all are upstream's: torchport raises or logs
    log.setLevel(logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO)


def run(command: click.Command) -> int:
    """Runs a command line and returns its exit code; prints torchport's errors on stderr, without a traceback."""
    sys.unraisablehook = _unraisable
    try:
        return _run_with_output(command)
    except TorchportError as error:
        complain(error.report())
        return error.exit_code
    except click.ClickException as error:
        usage = io.StringIO()
        error.show(usage)
        complain(_escaped_lines(usage.getvalue().rstrip()))
        return error.exit_code
    # Ctrl-C.
    except (click.Abort, KeyboardInterrupt):
        hosts.end(StoppedError.exit_code, hosts.AT_ONCE)


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Sends Ctrl-C again if Python dropped a KeyboardInterrupt in a callback, as in JAX's of the garbage collector."""
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)
        return
    again = threading.Timer(AGAIN, _thread.interrupt_main)
    again.daemon = True
    again.start()


def complain(text: str) -> None:
    """Prints a text to standard error, which may be closed."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)


class _UnwrittenError(OSError):
    """Raised if standard output cannot be written; tells this from an OSError of another file."""


class _Output:
    """Standard output whose `write` and `flush` raise `_UnwrittenError` where they fail."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._stream, name)
        if name not in ("write", "flush"):
            return attribute

        def checked(*texts: str) -> Any:
            try:
                return attribute(*texts)
            except OSError as error:
                raise _UnwrittenError(error.errno, error.strerror) from error

        return checked


def _run_with_output(command: click.Command) -> int:
    """Runs a command and flushes its output, or raises; returns the exit code, 1 if the reader of a pipe is gone."""
    stream = sys.stdout
    # Where standard output was closed, `sys.stdout` is None, and click prints nothing.
    checked = None if stream is None else cast("TextIO", _Output(stream))
    try:
        with contextlib.redirect_stdout(checked):
            try:
                code = command.main(prog_name=command.name, standalone_mode=False)
            except SystemExit as stop:
                code = stop.code
            # An error at Python's own flush, at exit, could not be reported.
            if checked is not None:
                checked.flush()
            return int(code or 0)
    except _UnwrittenError as error:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())  # so that Python does not try again at exit
        if error.errno == errno.EPIPE:
            return 1
        fact = f"It cannot be written: {error.strerror}"
        raise OutputError("standard output", fact, "Free some space, or send it somewhere else") from error
