"""The GPU benchmark as far as it goes without a GPU: its arguments, its rows, its table, its refusals."""

import importlib.util
import subprocess
import sys

import pytest
import torch


@pytest.fixture(scope="module")
def benchmark(root):
    """The benchmark's module."""
    spec = importlib.util.spec_from_file_location("attention_gpu", root / "benchmarks/attention_gpu.py")
    module = importlib.util.module_from_spec(spec)
    # Its dataclass looks for its own module by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


class Stub:
    """A worker that answers the same every time, or fails."""

    def __init__(self, milliseconds, fails=False):
        self.milliseconds, self.fails, self.asked = milliseconds, fails, []

    def ask(self, request):
        self.asked.append(request)
        if self.fails:
            return {"failed": "out of memory"}
        return {"first": [[1.0, 2.0]]} if "case" in request else {"milliseconds": self.milliseconds}


def test_operations_are_counted_over_valid_keys(benchmark):
    assert benchmark.Case(16, 128, 1000).teraflops(1.0) == pytest.approx(4 * 1000 * 1000 * 2048 / 1e9)
    assert benchmark.Case(16, 128, 1000, 500).teraflops(1.0) == pytest.approx(4 * 1000 * 500 * 2048 / 1e9)


def test_every_shape_has_a_row_with_and_one_without_a_length(benchmark):
    names = [case.name for case in benchmark.CASES]
    assert len(set(names)) == 8
    assert "16x128, 112,856 tokens" in names
    assert "48x64, 39,826 tokens, 39,049 valid" in names


def test_a_row_that_fails_leaves_the_other_framework_its_numbers(benchmark):
    case = benchmark.Case(16, 128, 1000)
    workers = {"jax": Stub(2.0), "torch": Stub(1.0)}
    good = benchmark.measure(case, workers, 3, 2)
    assert [len(worker.asked) for worker in workers.values()] == [4, 4]
    bad = benchmark.measure(case, {"jax": Stub(2.0, fails=True), "torch": Stub(1.0)}, 3, 2)
    lines = benchmark.table([good, bad]).splitlines()
    assert lines[1].split() == ["16x128,", "1,000", "tokens", "2.00", "4", "1.00", "8", "2.00", "0.0000"]
    assert lines[2].split() == ["16x128,", "1,000", "tokens", "-", "-", "1.00", "8", "-", "-"]
    assert lines[3] == "jax, 16x128, 1,000 tokens: out of memory"


def test_a_worker_without_a_gpu_says_why_and_goes_on(benchmark, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    worker = benchmark.Worker("jax")
    case = {"heads": 2, "head_size": 64, "tokens": 300, "length": 200}
    for _ in range(2):
        assert worker.ask({"case": case})["failed"].startswith("attention 'cudnn': JAX has no CUDA device here")
    worker.close()
    assert worker.process.returncode == 0


def test_a_worker_that_was_killed_fails_its_row(benchmark, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    worker = benchmark.Worker("torch")
    worker.process.kill()
    assert worker.ask({"calls": 1}) == {"failed": "the process ended with exit code -9"}
    worker.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_what_to_run(root):
    command = [sys.executable, str(root / "benchmarks/attention_gpu.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.endswith("On a machine that has one: pip install -e '.[cuda]' && python benchmarks/attention_gpu.py")


def test_its_arguments_have_defaults(benchmark):
    arguments = benchmark.parsed(["--only", "48x64", "--json"])
    assert (arguments.only, arguments.json, arguments.rounds, arguments.calls) == ("48x64", True, 7, 3)
