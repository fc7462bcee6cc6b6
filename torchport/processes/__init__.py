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


def trusted_path(path: list[str], is_main: bool = False) -> list[str]:
    """Returns a `sys.path` without the current folder, unless `PYTHONPATH` names it: `["", "/a"]` -> `["/a"]`. With
    `is_main` Python was started with `-m`, which puts the current folder first.
    """
    folder = current_folder()
    variable = os.environ.get("PYTHONPATH")
    entries = list(path[1:] if is_main and path and path[0] == folder else path)
    named = variable.split(os.pathsep) if variable else []
    # Python takes an empty entry of the variable for the current folder: that folder goes, unless it is named in full.
    if "" in named and folder in entries and folder not in map(os.path.abspath, filter(None, named)):
        entries.remove(folder)  # the first one only: another may come from an installed package
    return [entry for entry in entries if entry]
