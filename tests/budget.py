"""The processor time of the tests: measured for each test, printed by folder, and held by a budget.

Time is user and system time, with that of ended child processes. What a fixture of a file or of the session costs
counts for the first test that asks for it. The figures are divided by the machine's speed, which a fixed computation
measures again and again during the run: a slow or busy machine does not exceed the budget.

`tests/slow.txt` names the tests that only the nightly run takes.
"""

import collections
import fnmatch
import random
import resource
import statistics
import time
import tomllib
from pathlib import Path

import pytest

PRINTED = 10
TESTS_PER_CALIBRATION = 25
# More than a core's own cache holds, and in no order: as a heap of torch and JAX is.
NUMBERS = random.Random(0).sample([float(number) for number in range(200_000)], 200_000)
SLOW = Path(__file__).with_name("slow.txt")


def processor_seconds():
    """Returns user and system seconds of this process and of its children that have ended."""
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def calibration_seconds():
    """Returns the processor seconds of a fixed computation in this thread: some milliseconds.

    Two parts in three are Python's loop, one part reads memory: beside other processes, tests wait for memory more than
    they compute. With five processes on two cores the tests took 1.23 times as long, and this computation 1.25 times. A
    hash, which is computed in the cache, took 1.02 times as long.
    """
    start = time.thread_time()
    words = {}
    for number in range(30_000):
        words[str(number % 997)] = words.get(str(number % 991), 0) + number
    sum(NUMBERS)
    return time.thread_time() - start


def slow_patterns(file=SLOW):
    """Returns the patterns of `slow.txt`: test ids in which `*` stands for anything. `#` begins a comment."""
    lines = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def matches(identifier, pattern):
    """Returns whether a pattern names a test. Brackets, as parameters have them, mean themselves."""
    return fnmatch.fnmatchcase(identifier, pattern.replace("[", "[[]"))


def file_of(identifier):
    """Returns the file of a test, by its id or by a pattern."""
    return identifier.partition("::")[0]


def folder_of(identifier):
    """Returns the folder of a test's file below `tests/`, or the file itself where it lies in none."""
    return "/".join(file_of(identifier).split("/")[:2])


class Budget:
    """Measures, prints, and refuses: the plugin that `conftest.py` registers."""

    def __init__(self, config):
        settings = tomllib.loads((config.rootpath / "pyproject.toml").read_text(encoding="utf-8"))
        self.settings = settings["tool"]["torchport"]["tests"]
        self.config = config
        self.seconds = collections.Counter()
        self.calibrations = []
        self.before_tests = 0.0
        self.mark = 0.0
        self.excess = []
        self.dead = set()

    @property
    def is_default_run(self):
        """Whether this is `pytest` without a choice of tests, whose total is held."""
        option = self.config.option
        default = pytest.Config.ArgsSource.TESTPATHS
        chosen = option.keyword or "not slow" not in option.markexpr or getattr(option, "lf", False)
        return self.config.args_source == default and not chosen and not option.collectonly

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        """Marks the tests of `slow.txt`, and puts the files of tests in the order in which they take least.

        Those of patches walk over all objects of their process, so they come before any model is loaded.
        Whole models come next: a long file at the end would run alone.
        """
        patterns = collections.defaultdict(list)
        for pattern in slow_patterns():
            patterns[file_of(pattern)].append(pattern)
        matched = set()
        for item in items:
            found = [pattern for pattern in patterns.get(file_of(item.nodeid), ()) if matches(item.nodeid, pattern)]
            if found:
                item.add_marker(pytest.mark.slow)
            matched.update(found)
        # Of a file that is collected as a whole, each pattern has to name a test; a file that is gone has none.
        part = any("::" in argument for argument in self.config.args) or getattr(self.config.option, "lf", False)
        files = {file_of(item.nodeid) for item in items} if not part else set()
        files.update(file for file in patterns if not (self.config.rootpath / file).is_file())
        self.dead = {p for file in files for p in patterns.get(file, ()) if p not in matched}
        first = ("tests/patch/", "tests/patches/", "tests/commands/test_examples.py", "tests/test_")
        items.sort(key=lambda item: [not item.nodeid.startswith(start) for start in first])

    def pytest_collection_finish(self):
        """Notes what the imports and the collection took."""
        self.before_tests = processor_seconds()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self):
        """Begins to measure a test."""
        if not self.seconds or len(self.seconds) % TESTS_PER_CALIBRATION == 0:
            self.calibrations.append(calibration_seconds())
        self.mark = processor_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        """Notes in the report of a phase of a test (setup, call, teardown) what it took."""
        report = yield
        now = processor_seconds()
        report.processor_seconds, self.mark = now - self.mark, now
        return report

    def pytest_runtest_logreport(self, report):
        """Adds up the phases, in the process of the test and in that which prints."""
        self.seconds[report.nodeid] += getattr(report, "processor_seconds", 0.0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        """Takes what a worker measured beside its tests."""
        output = getattr(node, "workeroutput", {})
        self.before_tests += output.get("before_tests", 0.0)
        self.calibrations += output.get("calibrations", [])
        self.dead.update(output.get("dead", ()))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        """Hands a worker's figures over, or holds the run's total and each test to the budget."""
        if hasattr(self.config, "workeroutput"):
            figures = {"before_tests": self.before_tests, "calibrations": self.calibrations, "dead": sorted(self.dead)}
            self.config.workeroutput.update(figures)
            return
        if self.is_default_run and self.seconds:
            self.excess = self.excesses()
        if (self.excess or self.dead) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def slowness(self):
        """Returns how many times longer this machine takes than the one for which the budget was written."""
        return statistics.median(self.calibrations) / self.settings["calibration"] if self.calibrations else 1.0

    def excesses(self):
        """Returns in words what exceeds the budget."""
        slowness, found = self.slowness(), []
        total = (self.before_tests + self.seconds.total()) / slowness
        if total > self.settings["budget"]:
            found.append(f"The tests took {total:.0f} CPU-s. The budget is {self.settings['budget']} CPU-s.")
        limit, exceptions = self.settings["limit"], self.settings["exceptions"]
        for identifier, seconds in self.seconds.most_common():
            if seconds / slowness <= limit:
                break
            if not any(matches(identifier, pattern) for pattern in exceptions):
                found.append(f"{identifier} took {seconds / slowness:.1f} CPU-s. The limit of a test is {limit} CPU-s.")
        return found

    def pytest_terminal_summary(self, terminalreporter):
        """Prints the total by folder, the most expensive tests, and what exceeds the budget."""
        for pattern in sorted(self.dead):
            terminalreporter.write_line(f"{SLOW}: this pattern matches no test: {pattern}", red=True)
        if not self.seconds or not (self.is_default_run or self.config.option.budget):
            return
        slowness, write = self.slowness(), terminalreporter.write_line
        folders, counts = collections.Counter({"imports, collection": self.before_tests}), collections.Counter()
        for identifier, seconds in self.seconds.items():
            folders[folder_of(identifier)] += seconds
            counts[folder_of(identifier)] += 1
        total = folders.total() / slowness
        terminalreporter.section(f"{total:.0f} CPU-s, of {self.settings['budget']} in the budget")
        write(f"This machine takes {slowness:.2f} times as long as the budget's; the figures are divided by that.")
        for folder, seconds in folders.most_common():
            write(f"{seconds / slowness:8.1f}  {folder}  ({counts[folder]} tests)")
        write("The most expensive tests:")
        for identifier, seconds in self.seconds.most_common(PRINTED):
            write(f"{seconds / slowness:8.1f}  {identifier}")
        for line in self.excess:
            write(f"BUDGET: {line}", red=True)
