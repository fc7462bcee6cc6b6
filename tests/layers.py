"""The house rules as functions over a package's folder: each returns its complaints, `file:line: what is wrong`."""

import ast
import builtins
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

FLOORS = {
    "errors": 0,
    "progress": 0,
    "watch": 0.5,
    "folder": 0.5,
    "config": 1,
    "files": 1,
    "foreign": 1,
    "hosts": 1,
    "processes": 1,
    "terminal": 2,
    "stopping": 2,
    "cache": 2,
    "calibration": 2,
    "workers": 2,
    "card": 2,
    "pack": 3,
    "manifest": 3,
    "handwritten": 2,
    "machine": 2,
    "grid": 2,
    "patch": 3,
    "checkpoint": 3,
    "upstream": 3,
    "shard": 3,
    "topology": 3,
    "save": 4,
    "tiny": 3,
    "pipelines": 3,
    "attention": 3,
    "activations": 3,
    "stack": 3,
    "calls": 4,
    "report": 4,
    "load": 4,
    "schedule": 4,
    "hlo": 4,
    "video": 4,
    "compile": 4,
    "cost": 5,
    "exchange": 5,
    "task": 5,
    "preflight": 6,
    "resume": 6,
    "record": 6,
    "programs": 6,
    "workload": 6,
    "journey": 6.5,
    "run": 7,
    "outline": 7,
    "plan": 7.2,
    "sketch": 7.4,
    "calibrate": 7.6,
    "sweep": 7.6,
    "__main__": 9,
}
COMMAND = 8
"""The floor of every command: what the command line may choose."""
COMMANDS = {
    "doctor",
    "explain",
    "plan_command",
    "check",
    "verify",
    "scan",
    "tune",
    "exec",
    "bench",
    "patches_command",
    "shard_command",
    "serve",
    "profile",
}
LIGHT = {"errors", "config", "files", "progress", "processes", "terminal", "patch", "scan", "__main__"}
HEAVY = {"torch", "jax", "jaxlib", "torchax"}
AT_MODULE_LEVEL = {"torch", "jax", "numpy", "ml_dtypes", "pydantic", "yaml", "click", "packaging", "torchport"}
"""What may be imported at module level beside the standard library: torchport's own foundations, no upstream."""
NAMES = {"utils", "util", "core", "common", "helpers", "helper", "base", "manager", "misc"}
MODELS = re.compile(r"hunyuan|hyvideo|cogvideo|(?<![a-z])wan(?![a-z])", re.IGNORECASE)
STARTS = re.compile(
    r"(subprocess|multiprocessing|pty|runpy|concurrent\.futures\.ProcessPoolExecutor)(\..*)?"
    r"|os\.(system|popen|fork|forkpty|exec\w+|spawn\w+|posix_spawn\w*)|asyncio\.create_subprocess_\w+"
)
"""What starts a process, or another program in this one."""
LONGEST_FUNCTION, MEDIAN_FUNCTION, LONGEST_MODULE = 60, 15, 400

Module = tuple[str, Path, str, ast.Module]


def modules(package: Path) -> list[Module]:
    """Returns each module's dotted name below the package ("" for its own `__init__`), file, text and tree."""
    found = []
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        text = file.read_text(encoding="utf-8")
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append((name, file, text, ast.parse(text)))
    return found


def unit(name: str) -> str:
    """Returns the unit of a module: itself, or the folder that it lies in."""
    return name.partition(".")[0]


def floor(name: str) -> int | None:
    """Returns the floor of a module, or None where it has none."""
    return COMMAND if unit(name) in COMMANDS else FLOORS.get(unit(name))


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and full name of everything that is imported anywhere in a tree; `from a import b` is `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)


def at_module_level(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields what is imported when the module is: not inside a function, not under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (found for other in node.orelse for found in imports(other))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(node)
        else:
            yield from at_module_level(node)


def own(target: str, known: set[str]) -> str | None:
    """Returns the module of this package that an imported name is, or is in; None for other packages' names."""
    if target.partition(".")[0] != "torchport":
        return None
    parts = target.split(".")[1:]
    while parts and ".".join(parts) not in known:
        parts = parts[:-1]
    return ".".join(parts)


def floors(found: list[Module]) -> list[str]:
    """Complains about imports of a module's own floor or one above, and about modules without a floor."""
    complaints, known = [], {name for name, *_ in found}
    for name, file, _, tree in found:
        if name and floor(name) is None:
            complaints.append(f"{file.name}:1: '{unit(name)}' has no floor")
            continue
        within = at_module_level(tree) if not name else imports(tree)
        for line, target in within:
            if target.startswith("."):
                complaints.append(f"{file.name}:{line}: '{target}' is relative")
            other = own(target, known)
            if not other or (name and unit(other) == unit(name)):
                continue
            above = 0 if not name else floor(name)
            if floor(other) is None or floor(other) >= above:
                complaints.append(f"{file.name}:{line}: floor {above} imports '{other}' of floor {floor(other)}")
    return complaints


def cycles(found: list[Module]) -> list[str]:
    """Complains about modules that import one another in a circle, inside a folder or across."""
    known = {name for name, *_ in found}
    edges = {name: {own(target, known) for _, target in imports(tree)} - {None, name} for name, _, _, tree in found}
    complaints: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            circle = path[path.index(name) :]
            if min(circle) == name:
                complaints.append(f"{' -> '.join((*circle, name))} is a cycle")
            return
        for other in sorted(edges[name] - {""}):
            visit(other, (*path, name))

    for name in sorted(edges):
        visit(name, ())
    return sorted(set(complaints))


def upstream(found: list[Module]) -> list[str]:
    """Complains about upstream packages that are imported at module level, before their patches can be in place."""
    allowed = AT_MODULE_LEVEL | set(sys.stdlib_module_names)
    return [
        f"{file.name}:{line}: '{target.partition('.')[0]}' is imported at module level"
        for _, file, _, tree in found
        for line, target in at_module_level(tree)
        if not target.startswith(".") and target.partition(".")[0] not in allowed
    ]


def light(found: list[Module]) -> list[str]:
    """Complains about torch and jax in modules that work without them, wherever in the module they are imported."""
    return [
        f"{file.name}:{line}: '{unit(name)}' imports {target.partition('.')[0]}"
        for name, file, _, tree in found
        if unit(name) in LIGHT
        for line, target in imports(tree)
        if target.partition(".")[0] in HEAVY
    ]


def names(found: list[Module]) -> list[str]:
    """Complains about modules named after no noun, modules without a docstring, and notes to oneself."""
    complaints = []
    for name, file, text, tree in found:
        complaints += [f"{file}:1: a module is named '{part}'" for part in name.split(".") if part in NAMES]
        if not ast.get_docstring(tree):
            complaints.append(f"{file.name}:1: the module has no docstring")
        for number, line in enumerate(text.splitlines(), 1):
            complaints += [f"{file.name}:{number}: {word}" for word in re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b", line)]
    return complaints


def sizes(found: list[Module]) -> list[str]:
    """Complains about functions and modules that are too long to be read at once."""
    complaints, lengths = [], []
    for _, file, text, tree in found:
        lines = len(text.splitlines())
        if lines > LONGEST_MODULE:
            complaints.append(f"{file.name}:1: the module has {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                lengths.append(length)
                if length > LONGEST_FUNCTION:
                    complaints.append(f"{file.name}:{node.lineno}: '{node.name}' has {length} lines")
    if lengths and statistics.median(lengths) > MEDIAN_FUNCTION:
        complaints.append(f"the median function has {statistics.median(lengths)} lines")
    return complaints


def statements(found: list[Module]) -> list[str]:
    """Complains about handlers that swallow everything, and about `print` outside the command line."""
    complaints = []
    for name, file, _, tree in found:
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and not _reraises(node):
                caught = [part.id for part in ast.walk(node.type or ast.Name("BaseException")) if hasattr(part, "id")]
                if {"Exception", "BaseException"} & set(caught):
                    complaints.append(f"{file.name}:{node.lineno}: a handler catches everything")
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if is_call and node.func.id == builtins.print.__name__ and name != "__main__":
                complaints.append(f"{file.name}:{node.lineno}: print outside the command line")
    return complaints


def _reraises(handler: ast.ExceptHandler) -> bool:
    """Whether a handler of BaseException only tidies up: it names the class, and its last statement is `raise`."""
    last = handler.body[-1]
    named = isinstance(handler.type, ast.Name) and handler.type.id == "BaseException"
    return named and isinstance(last, ast.Raise) and last.exc is None


def models(found: list[Module]) -> list[str]:
    """Complains about a model's name outside `pipelines/`; indented examples in docstrings may name data."""
    complaints = []
    for name, file, text, tree in found:
        if unit(name) == "pipelines":
            continue
        examples = _examples(tree)
        for number, line in enumerate(text.splitlines(), 1):
            word = MODELS.search(line)
            if word and number not in examples:
                complaints.append(f"{file.name}:{number}: '{word[0]}' is one model's name")
    return complaints


def _examples(tree: ast.Module) -> set[int]:
    """Returns the lines of indented examples in a module's docstring."""
    if not ast.get_docstring(tree):
        return set()
    node = tree.body[0]
    lines = ast.get_docstring(tree, clean=False).splitlines()
    return {node.lineno + offset for offset, line in enumerate(lines) if line.startswith("    ")}


def children(found: list[Module]) -> list[str]:
    """Complains about whatever can start a process, outside `processes/`, which keeps the current folder out of it."""
    return [
        f"{file.name}:{line}: '{target}' starts processes, and that is for 'processes' alone"
        for name, file, _, tree in found
        if unit(name) != "processes"
        for line, target in [*imports(tree), *_attributes_of_os(tree)]
        if STARTS.fullmatch(target)
    ]


def _attributes_of_os(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("os", "asyncio"):
            yield node.lineno, f"{node.value.id}.{node.attr}"


RULES = (floors, cycles, upstream, light, names, sizes, statements, models, children)


def complaints(package: Path) -> list[str]:
    """Returns every rule's complaints about a package's folder."""
    found = modules(package)
    return [complaint for rule in RULES for complaint in rule(found)]
