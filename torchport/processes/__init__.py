"""Other processes, and where a process imports from: what the user has named, and never the current folder unasked.

The current folder may hold somebody else's files: a `json.py` in it would run instead of Python's own.
"""

import os

# Nothing else is imported, `__future__` included: the current folder may still be first in the path.


def current_folder() -> str | None:
    """Returns the current folder; None where it was removed."""
    try:
        return os.getcwd()  # noqa: PTH109 - pathlib is not imported here
    except OSError:
        return None


def without_empty(value: str) -> str:
    """Returns a `PYTHONPATH` without its empty entries: Python takes each of them for the current folder."""
    return os.pathsep.join(filter(None, value.split(os.pathsep)))


def trusted_path(path: list[str], started: bool = False) -> list[str]:
    """Returns a `sys.path` without the current folder, unless `PYTHONPATH` names it.

    Args:
        started: Whether Python was started with `-m`, which puts the current folder first.
    """
    here, variable = current_folder(), os.environ.get("PYTHONPATH")
    entries_of_variable = variable.split(os.pathsep) if variable else []
    entries = list(path[1:] if started and path and path[0] == here else path)
    if (
        "" in entries_of_variable
        and here in entries
        and here not in map(os.path.abspath, filter(None, entries_of_variable))
    ):
        entries.remove(here)  # the first one only: another may come from an installed package
    return [entry for entry in entries if entry]
