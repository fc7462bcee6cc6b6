"""The budget of the tests is held: a run that exceeds it fails and names the test, and a dead pattern is an error."""

import os
import subprocess
import sys
import tomllib

import budget
import pytest

PROJECT = """
[tool.pytest.ini_options]
testpaths = ["tests"]
addopts = "-m 'not slow' -p no:cacheprovider"
markers = ["slow: at night"]
[tool.torchport.tests]
budget = {budget}
limit = {limit}
exceptions = {exceptions}
calibration = 0.0060
"""
CONFTEST = """
import budget

budget.SLOW = __import__("pathlib").Path(__file__).with_name("slow.txt")
budget.slow_patterns.__defaults__ = (budget.SLOW,)

def pytest_addoption(parser):
    parser.addoption("--budget", action="store_true")

def pytest_configure(config):
    config.pluginmanager.register(budget.Budget(config))
"""
TESTS = """
import time

def test_cheap():
    pass

def test_expensive():
    start = time.process_time()
    while time.process_time() - start < 1:
        pass

def test_nightly():
    assert False
"""


@pytest.fixture
def pytest_of(tmp_path, root):
    """Runs pytest in a project of three tests with a budget; returns its exit code and what it printed."""

    def run(*arguments, budget=1000, limit=1000, exceptions=(), slow="tests/test_a.py::test_nightly", tests=TESTS):
        (tmp_path / "tests").mkdir(exist_ok=True)
        settings = PROJECT.format(budget=budget, limit=limit, exceptions=list(exceptions))
        (tmp_path / "pyproject.toml").write_text(settings)
        (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)
        (tmp_path / "tests" / "test_a.py").write_text(tests)
        (tmp_path / "tests" / "slow.txt").write_text(f"# at night\n{slow}  # why\n")
        environment = {**os.environ, "PYTHONPATH": str(root / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [sys.executable, "-m", "pytest", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_run_within_the_budget_passes_and_prints_where_the_time_went(pytest_of):
    code, text = pytest_of("-p", "xdist", "-n", "2")
    assert code == 0 and "2 passed" in text and "BUDGET" not in text
    assert "tests/test_a.py  (2 tests)" in text and "imports, collection" in text


def test_a_test_over_the_limit_fails_the_run_by_name(pytest_of):
    code, text = pytest_of(limit=0.2)
    assert code == 1 and "2 passed" in text
    assert "BUDGET: tests/test_a.py::test_expensive took" in text and "The limit of a test is 0.2 CPU-s." in text
    assert "test_cheap took" not in text
    code, text = pytest_of(limit=0.2, exceptions=["tests/test_a.py::test_exp*"])
    assert code == 0 and "BUDGET" not in text


def test_a_total_over_the_budget_fails_a_whole_run_and_no_other(pytest_of):
    code, text = pytest_of(budget=0.1)
    assert code == 1 and "BUDGET: The tests took" in text and "The budget is 0.1 CPU-s." in text
    assert pytest_of("tests/test_a.py", budget=0.1)[0] == 0


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")], ids=["one process", "workers"])
def test_a_pattern_that_names_no_test_or_no_file_fails_the_run(pytest_of, workers):
    code, text = pytest_of(*workers, "-k", "not nightly", slow="tests/test_a.py::test_gone\ntests/test_gone.py::*")
    assert code == 1 and "2 passed" in text
    assert "slow.txt: this pattern matches no test: tests/test_a.py::test_gone" in text
    assert "slow.txt: this pattern matches no test: tests/test_gone.py::*" in text


def test_a_choice_of_a_files_tests_may_leave_a_pattern_without_one(pytest_of):
    assert pytest_of("tests/test_a.py::test_cheap")[0] == 0
    pytest_of("-o", "addopts=", "-k", "cheap", tests="def test_cheap(): assert False\ndef test_nightly(): pass")
    code, text = pytest_of("-o", "addopts=", "--lf")
    assert code == 0 and "1 passed" in text and "pattern" not in text


def test_brackets_in_a_pattern_are_those_of_parameters():
    assert budget.matches("tests/a.py::test_b[x-[1]]", "tests/a.py::test_b[x-*")
    assert not budget.matches("tests/a.py::test_bx", "tests/a.py::test_b[x]")


def test_the_exceptions_are_at_most_ten_and_each_names_a_test(root):
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["torchport"]["tests"]
    assert len(settings["exceptions"]) <= 10
    for identifier in settings["exceptions"]:
        file, _, name = identifier.partition("::")
        assert f"def {name.partition('[')[0]}(" in (root / file).read_text(), identifier
