"""Becomes another Python program, with a function that is called in it before its first line.

The process is replaced (`os.execve`), and Python itself starts the program: `sys.argv`, `__main__`, `sys.path`, exit
code, traceback and signals are the program's own. Python imports `sitecustomize` before it runs anything, and we put
one first on its path. That one calls the function, and then takes itself away.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torchport.errors import BadValueError, TorchportError
from torchport.files.folder import refused
from torchport.processes import without_empty

_START = "TORCHPORT_BEGIN"
"""The variable that says what is called in the process with a number, and how its path was."""
_HOOK = str(Path(__file__).parent / "site")


def check(words: Sequence[str]) -> None:
    """Refuses a command line that names no program."""
    place = "torchport exec"
    if not words or (words[0] == "-m" and len(words) < 2):
        raise BadValueError(place, "No script is named", "Add it: -- script.py ARGS, or -- -m package.module ARGS")
    if words[0] != "-m" and words[0].startswith("-"):
        fact = f"'{words[0]}' is no script, and Python's own flags are not taken"
        raise BadValueError(place, fact, "Write -- script.py ARGS, or -- -m package.module ARGS")
    if words[0] != "-m":
        try:
            Path(words[0]).stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            fact = "There is no such file"
            raise BadValueError(f"{place} {words[0]}", fact, "Name the script that is to run") from error
        except OSError as error:
            raise refused(place, words[0], error) from error


def become(words: Sequence[str], function: str, arguments: Mapping[str, Any]) -> NoReturn:
    """Replaces this process by a Python program, in which a function is called first.

    Args:
        words: `FILE ARGS...`, or `-m package.module ARGS...`.
        function: `package.module:function`. A refusal of it ends the process.
        arguments: Its keywords; what JSON can carry.
    """
    before = os.environ.get("PYTHONPATH")
    start = {"process": os.getpid(), "function": function, "arguments": dict(arguments), "path": before}
    entries = [_HOOK, *filter(None, [without_empty(before or "")])]
    environment = {**os.environ, _START: json.dumps(start), "PYTHONPATH": os.pathsep.join(entries)}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *words], environment)


def start() -> None:
    """Runs in the new process, as its `sitecustomize`: calls the function, and removes all traces of itself."""
    message = json.loads(os.environ.pop(_START, "{}"))
    _remove_hook(message)
    if message.get("process") != os.getpid():  # a child of a program that has kept the variables
        return
    module, _, name = message["function"].partition(":")
    # Upstreams may lie in the folder that Python will put first on the path.
    first = next((word for word in sys.orig_argv[1:2]), "")
    added = os.getcwd() if first == "-m" else str(Path(first).resolve().parent)  # noqa: PTH109 - as Python does
    if Path(first).is_dir():
        added = str(Path(first))
    sys.path.insert(0, added)
    try:
        getattr(importlib.import_module(module), name)(**message["arguments"])
    except TorchportError as error:
        sys.stderr.write(f"{error.report()}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)  # an exception would be printed as one of `site`, and the program would run
    if added in sys.path:
        sys.path.remove(added)


def _remove_hook(message: Mapping[str, Any]) -> None:
    """Restores path and environment, and imports the `sitecustomize` that would have been imported without us."""
    sys.path[:] = [entry for entry in sys.path if entry != _HOOK]
    before = message.get("path")
    if before is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = before
    ours = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours
