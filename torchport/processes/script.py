"""Becomes another Python program, with a function that is called in it before its first line.

The process is replaced (`os.execve`), and Python itself starts the program: `sys.argv`, `__main__`, `sys.path`, exit
code, traceback and signals are the program's own. Python imports `sitecustomize` before it runs anything, and we put
ours first on its path. Ours calls the function, and then removes itself.
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

_VARIABLE = "TORCHPORT_BEGIN"
"""The variable with `become`'s message as JSON: the process's id, the function, its arguments, `PYTHONPATH` before."""
_HOOK = str(Path(__file__).parent / "site")
"""The folder with our `sitecustomize.py`, which calls `start`."""


def check(words: Sequence[str]) -> None:
    """Refuses the words of a command line that are neither `FILE ARGS...` nor `-m package.module ARGS...`."""
    place = "torchport exec"
    if not words or (words[0] == "-m" and len(words) < 2):
        raise BadValueError(place, "No script is named", "Add it: -- script.py ARGS, or -- -m package.module ARGS")
    if words[0] == "-m":
        return
    if words[0].startswith("-"):
        fact = f"'{words[0]}' is no script, and Python's own flags are not taken"
        raise BadValueError(place, fact, "Write -- script.py ARGS, or -- -m package.module ARGS")
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
        words: The program, as `check` takes it.
        function: `package.module:function`. If it raises a TorchportError, the process ends.
        arguments: The function's keyword arguments, as JSON can carry them.
    """
    before = os.environ.get("PYTHONPATH")
    message = {"process": os.getpid(), "function": function, "arguments": dict(arguments), "path": before}
    search_path = without_empty(f"{_HOOK}{os.pathsep}{before or ''}")
    environment = {**os.environ, _VARIABLE: json.dumps(message), "PYTHONPATH": search_path}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *words], environment)


def start() -> None:
    """Runs in the new process, from `sitecustomize`: restores path and environment, and calls the named function."""
    message = json.loads(os.environ.pop(_VARIABLE, "{}"))
    _remove_hook(message)
    if message.get("process") != os.getpid():  # a child of a program that has kept the variables
        return
    module, _, name = message["function"].partition(":")
    # Upstreams may lie in the folder that Python will put first on the path: the program's, or the current one.
    program = next(iter(sys.orig_argv[1:2]), "")
    if Path(program).is_dir():
        folder = str(Path(program))
    else:
        folder = os.getcwd() if program == "-m" else str(Path(program).resolve().parent)  # noqa: PTH109 - as Python does
    sys.path.insert(0, folder)
    try:
        getattr(importlib.import_module(module), name)(**message["arguments"])
    except TorchportError as error:
        sys.stderr.write(f"{error.report()}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)  # an exception would be printed as one of `site`, and the program would run
    if folder in sys.path:
        sys.path.remove(folder)


def _remove_hook(message: Mapping[str, Any]) -> None:
    """Restores path and environment, and imports the `sitecustomize` that ours has taken the place of, if any."""
    sys.path[:] = [entry for entry in sys.path if entry != _HOOK]
    os.environ.pop("PYTHONPATH", None)
    if message.get("path") is not None:
        os.environ["PYTHONPATH"] = message["path"]
    hook = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = hook
