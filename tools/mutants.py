"""Whether the tests notice when the source is wrong: mutants drawn with a seed, each run against its module's tests.

    python tools/mutants.py list --seed 1 --count 60 > mutants.json
    python tools/mutants.py run mutants.json --jobs 2 > result.json
    python tools/mutants.py run mutants.json --only result.json --marker slow > slow.json    # the survivors again

A mutant is one edit: a comparison turned, a constant moved, a branch never taken, `and` for `or`, a `not` less, None
returned. It runs against the mirrored file, `tests/a/test_b.py` of `torchport/a/b.py`, and if it survives, against the
rest of that folder. It is found again by its function and the text of its line, so a list can be run in a later tree.

Neither library serves: mutmut 3 runs the whole suite first and puts trampolines into functions whose source is hashed
here; cosmic-ray has one test command for all modules; and neither draws by a seed.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import dataclasses
import itertools
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OPERATOR = re.compile(r"is not|not in|is|in|[=!<>]=|[<>]|and|or")
OTHER = {"==": "!=", "<": "<=", ">": ">=", "is": "is not", "in": "not in", "and": "or"}
OTHER |= {value: key for key, value in OTHER.items()}
NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
NO_STATEMENT = ast.ExceptHandler | ast.match_case
"""What holds statements and is none."""
UNTOUCHED = ("annotation", "returns", "decorator_list", "msg")
"""Fields of nodes that are not mutated: types, decorators, the messages of assertions."""
NOT_COPIED = ("__pycache__", ".*_cache", ".git", ".venv", "outputs")
"""What a copy of the checkout does without; a test that asks git fails there."""
UNNOTICED = ("survived", "no tests")
"""Outcomes of mutants that no test noticed."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One edit: at a column of a line, `mutated` takes the place of `original`, which may go on in the next lines.

    Attributes:
        text: The line, without its indentation; `column` counts from there, in characters.
        function: The qualified name of the function or class that has the line; empty at the level of the module.
        nth: How many places of the function before this one look the same.
    """

    file: str
    line: int
    column: int
    original: str
    mutated: str
    function: str
    kind: str
    text: str
    nth: int = 0


class Source:
    """A file's text, with an offset in characters for each position that `ast` gives in bytes."""

    def __init__(self, text: str) -> None:
        self.text, self.tree, self.lines = text, ast.parse(text), text.split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)

    def span(self, node: Any) -> tuple[int, int]:
        """Returns where a node begins and ends."""
        ends = ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        start, end = (self.starts[n - 1] + len(self.lines[n - 1].encode()[:at].decode()) for n, at in ends)
        return start, end

    def statements(self, node: ast.AST | None = None, name: str = "") -> Iterator[tuple[str, ast.stmt]]:
        """Yields all statements, with the qualified name of the function or class that they belong to."""
        for child in ast.iter_child_nodes(node or self.tree):
            inner = f"{name}.{child.name}".lstrip(".") if isinstance(child, NAMED) else name
            if isinstance(child, ast.stmt):
                yield inner, child
            if isinstance(child, ast.stmt | NO_STATEMENT):
                yield from self.statements(child, inner)

    def places(self, mutant: Mutant) -> list[int]:
        """Returns the offsets where the mutant's original stands: in its function, on a line of its text."""
        named = [node for name, node in self.statements() if name == mutant.function and isinstance(node, NAMED)]
        spans = [range(node.lineno, (node.end_lineno or 0) + 1) for node in named]
        numbers = {number for span in spans for number in span} if mutant.function else range(1, len(self.lines) + 1)
        same = [number - 1 for number in sorted(numbers) if self.lines[number - 1].strip() == mutant.text]
        offsets = [self.starts[n] + self.lines[n].index(mutant.text) + mutant.column for n in same]
        return [at for at in offsets if self.text.startswith(mutant.original, at)]

    def mutated(self, mutant: Mutant) -> str | None:
        """Returns the text with the mutant in it, or None where its place is not found."""
        places = self.places(mutant)
        if mutant.nth >= len(places):
            return None
        at = places[mutant.nth]
        return self.text[:at] + mutant.mutated + self.text[at + len(mutant.original) :]

    def mutant(self, file: str, function: str, kind: str, start: int, end: int, mutated: str) -> Mutant:
        """Returns the record of an edit."""
        line = sum(at <= start for at in self.starts)
        text = self.lines[line - 1].strip()
        column = start - self.starts[line - 1] - self.lines[line - 1].index(text)
        found = Mutant(file, line, column, self.text[start:end], mutated, function, kind, text)
        return dataclasses.replace(found, nth=self.places(found).index(start))

    def edits(self, statement: ast.stmt) -> Iterator[tuple[str, int, int, str]]:
        """Yields the edits of a statement, without those of statements inside it: kind, start, end, new text."""
        if isinstance(statement, ast.Return) and not isinstance(statement.value, ast.Constant | ast.Name | None):
            yield "return", *self.span(statement), "return None"
        if isinstance(statement, ast.If) and not statement.orelse:
            yield "branch", *self.span(statement.test), "False"
        for node in expressions(statement):
            if isinstance(node, ast.Compare):
                yield from self._exchanged("comparison", [node.left, *node.comparators])
            elif isinstance(node, ast.BoolOp):
                yield from self._exchanged("and/or", node.values)
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                yield "not", *self.span(node), f"({self.text[slice(*self.span(node.operand))]})"
            elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
                yield "constant", *self.span(node), repr(moved(node.value))

    def _exchanged(self, kind: str, operands: list[ast.expr]) -> Iterator[tuple[str, int, int, str]]:
        for left, right in itertools.pairwise(operands):
            first, last = self.span(left)[1], self.span(right)[0]
            operator = OPERATOR.search(self.text, first, last)
            if operator and "#" not in self.text[first:last]:
                yield kind, *operator.span(), OTHER[operator.group()]


def moved(value: bool | int | float) -> bool | int | float:
    """Returns another constant: a bool flipped, an int and 1, a float doubled."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) or not value else 2 * value


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a statement that run, without formatted texts and the statements inside it."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            inside = isinstance(child, ast.stmt | NO_STATEMENT | ast.JoinedStr)
            if isinstance(child, ast.AST) and not inside and field not in UNTOUCHED:
                yield child
                yield from expressions(child)


def is_mutated(function: str, statement: ast.stmt) -> bool:
    """Returns whether a statement may be drawn: no refusal, no guard of imports, no `__all__`, no plain default."""
    if isinstance(statement, ast.If):
        return not {"TYPE_CHECKING", "__name__"} & {n.id for n in ast.walk(statement.test) if isinstance(n, ast.Name)}
    if isinstance(statement, ast.Assign):
        return "__all__" not in [getattr(target, "id", "") for target in statement.targets]
    is_default = isinstance(statement, ast.AnnAssign) and isinstance(statement.value, ast.Constant) and function != ""
    return not isinstance(statement, ast.Raise) and not is_default


def drawn(root: Path, under: str, seed: int, count: int, same_as: Path | None = None) -> list[Mutant]:
    """Returns mutants of a folder, drawn evenly over the statements that have one.

    Args:
        root: The checkout.
        under: The folder, from there.
        seed: Of the draw.
        count: How many, at most.
        same_as: A checkout; files that have another text there are left out.
    """
    choices = []
    for file in sorted((root / under).rglob("*.py")):
        name, content = file.relative_to(root).as_posix(), file.read_bytes()
        if same_as and not ((same_as / name).is_file() and (same_as / name).read_bytes() == content):
            continue
        source = Source(content.decode())
        for function, statement in source.statements():
            edits = list(source.edits(statement)) if is_mutated(function, statement) else []
            choices += [(source, name, function, edits)] if edits else []
    rng = random.Random(seed)
    picked = [choices[number] for number in sorted(rng.sample(range(len(choices)), min(count, len(choices))))]
    return [source.mutant(name, function, *rng.choice(edits)) for source, name, function, edits in picked]


def suites(root: Path, file: str) -> list[list[str]]:
    """Returns the arguments of pytest for a module's own tests, and for the rest of their folder."""
    _, *folders, name = Path(file).parts
    mirrored = str(Path("tests", *folders, f"test_{name.removesuffix('.py').strip('_')}.py"))
    own = [mirrored] if (root / mirrored).is_file() else []
    while folders and not (root / "tests").joinpath(*folders).is_dir():
        folders.pop()
    rest = [str(Path("tests", *folders)), *(f"--ignore={one}" for one in own)] if folders else []
    return [tests for tests in (own, rest) if tests]


@dataclasses.dataclass(frozen=True)
class Runner:
    """Runs mutants, each in a copy of the checkout that no other one uses meanwhile."""

    copies: queue.Queue[Path]
    marker: str | None
    timeout: float
    check: bool
    clean: dict[str, bool] = dataclasses.field(default_factory=dict)
    """Whether tests pass without a mutant."""

    def verdict(self, mutant: Mutant) -> dict[str, Any]:
        """Returns the mutant's record, with the outcome, the seconds, and the test that kills it."""
        copy, started = self.copies.get(), time.monotonic()
        try:
            outcome, test = self._outcome(copy, mutant)
        finally:
            self.copies.put(copy)
        seconds = round(time.monotonic() - started, 1)
        print(f"{outcome:10} {seconds:6.1f} s  {mutant.file}:{mutant.line} {test}", file=sys.stderr, flush=True)
        return {**dataclasses.asdict(mutant), "outcome": outcome, "seconds": seconds, "test": test}

    def _outcome(self, copy: Path, mutant: Mutant) -> tuple[str, str]:
        file, outcomes = copy / mutant.file, []
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        mutated = Source(text).mutated(mutant)
        if mutated is None:
            return "not found", ""
        for tests in suites(copy, mutant.file):
            if self.check and not self._passes(copy, tests):
                return "fails without it", " ".join(tests)
            file.write_text(mutated, encoding="utf-8")
            try:
                outcome, test = self._ran(copy, tests)
            finally:
                file.write_text(text, encoding="utf-8")
            if outcome in ("killed", "timed out"):
                return outcome, test
            outcomes.append(outcome)
        return "survived" if "survived" in outcomes else "no tests", ""

    def _passes(self, copy: Path, tests: list[str]) -> bool:
        """Returns whether tests pass without a mutant; each are run once."""
        name = " ".join(tests)
        if name not in self.clean:
            self.clean[name] = self._ran(copy, tests)[0] in ("survived", "no tests")
        return self.clean[name]

    def _ran(self, copy: Path, tests: list[str], again: bool = True) -> tuple[str, str]:
        """Runs tests in a process group of their own; returns the outcome, and the first test that fails.

        If no test is said to fail, they are run again: it may have been the machine that ended them.
        """
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
        command += ["-m", self.marker] if self.marker else []
        # Bytecode is known by its source's size and second, which a mutant may share with the original.
        world = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        pipe, out = subprocess.PIPE, subprocess.STDOUT
        with subprocess.Popen(
            command, cwd=copy, env=world, stdout=pipe, stderr=out, text=True, errors="replace", start_new_session=True
        ) as child:
            try:
                text, _ = child.communicate(timeout=self.timeout)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                return "timed out", " ".join(tests)
        summed_up = text.rpartition("short test summary info")[2]
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", summed_up, re.MULTILINE)
        outcome = {0: "survived", 5: "no tests"}.get(child.returncode, "killed")
        if outcome != "killed" or failed:
            return outcome, failed.group(1) if failed else ""
        last = text.strip().rpartition("\n")[2]
        return self._ran(copy, tests, again=False) if again else (outcome, f"exit {child.returncode}: {last}")


def run(mutants: list[Mutant], root: Path, jobs: int, **settings: Any) -> list[dict[str, Any]]:
    """Returns the verdicts on mutants, in their order."""
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            copy = Path(folder, str(number))
            shutil.copytree(root, copy, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
            copies.put(copy)
        return list(pool.map(Runner(copies, **settings).verdict, mutants))


def summary(verdicts: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the table of outcomes by kind, the share killed, and the edit of each survivor."""
    outcomes = list(dict.fromkeys(verdict["outcome"] for verdict in verdicts))
    yield "".join(f"{word:>18}" for word in ["kind", *outcomes])
    for kind in dict.fromkeys(verdict["kind"] for verdict in verdicts):
        counts = collections.Counter(verdict["outcome"] for verdict in verdicts if verdict["kind"] == kind)
        yield "".join(f"{word:>18}" for word in [kind, *(counts[outcome] for outcome in outcomes)])
    counts = collections.Counter(verdict["outcome"] for verdict in verdicts)
    killed = counts["killed"] + counts["timed out"]
    judged = killed + sum(counts[outcome] for outcome in UNNOTICED)
    yield f"killed: {killed} of {judged} ({100 * killed / max(judged, 1):.0f} %)"
    for verdict in verdicts:
        if verdict["outcome"] in UNNOTICED:
            text, column, length = verdict["text"], verdict["column"], len(verdict["original"])
            yield f"\n{verdict['file']}:{verdict['line']} {verdict['function']}: {verdict['outcome']}"
            yield f"- {text}\n+ {text[:column]}{verdict['mutated']}{text[column + length :]}"


def read(file: Path) -> list[Mutant]:
    """Returns the mutants of a list, or those of a file of verdicts that no test noticed."""
    names = [field.name for field in dataclasses.fields(Mutant)]
    records = [record for record in json.loads(file.read_bytes()) if record.get("outcome", UNNOTICED[0]) in UNNOTICED]
    return [Mutant(**{name: record[name] for name in names}) for record in records]


def main() -> None:
    """Prints JSON; the summary goes to standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="draw mutants, as JSON")
    listing.add_argument("--seed", type=int, required=True)
    listing.add_argument("--count", type=int, required=True)
    listing.add_argument("--under", default="torchport", metavar="DIR", help="the folder [torchport]")
    listing.add_argument("--same-as", type=Path, metavar="DIR", help="only files with the same text in this checkout")
    running = commands.add_parser("run", help="run the tests against mutants; the verdicts as JSON")
    running.add_argument("mutants", type=Path, metavar="FILE")
    running.add_argument("--marker", metavar="EXPR", help="pytest's -m, such as slow")
    running.add_argument("--jobs", type=int, default=1, metavar="N", help="copies of the checkout at work [1]")
    running.add_argument("--timeout", type=float, default=300, metavar="S", help="seconds of one run of pytest [300]")
    running.add_argument("--only", type=Path, metavar="FILE", help="verdicts: only what no test noticed there")
    running.add_argument("--check", action="store_true", help="first run each set of tests without a mutant")
    arguments = parser.parse_args()
    if arguments.command == "list":
        mutants = drawn(ROOT, arguments.under, arguments.seed, arguments.count, arguments.same_as)
        print(json.dumps([dataclasses.asdict(mutant) for mutant in mutants], indent=1))
        return
    mutants = read(arguments.mutants)
    if arguments.only:
        left = read(arguments.only)
        mutants = [mutant for mutant in mutants if mutant in left]
    settings = {name: getattr(arguments, name) for name in ("marker", "timeout", "check")}
    verdicts = run(mutants, ROOT, arguments.jobs, **settings)
    print(json.dumps(verdicts, indent=1))
    print("\n".join(summary(verdicts)), file=sys.stderr)


if __name__ == "__main__":
    main()
