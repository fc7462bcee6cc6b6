"""The labels of benchmarks/scan.py are what the scanner can find, and its figures are what they say."""

import importlib.util

import pytest
import yaml

from torchport.porting.scan import BY_KIND
from torchport.porting.scan import scanning as scan


@pytest.fixture(scope="module")
def benchmark(root):
    """benchmarks/scan.py as a module."""
    spec = importlib.util.spec_from_file_location("scan_benchmark", root / "benchmarks" / "scan.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_label_has_a_kind_and_a_reach(root, benchmark):
    data = yaml.safe_load((root / "benchmarks" / "scan_labels.yaml").read_text(encoding="utf-8"))
    for codebase in data.values():
        labels = benchmark.listed(codebase["labels"])
        assert len(labels) > 70 and ":" in codebase["entry"]
        assert {kind for _, _, kind in labels} <= set(BY_KIND)
        assert set(labels.values()) == {"path", "training", "off"}


def test_precision_is_of_what_is_found_and_recall_of_what_is_listed(benchmark):
    said = benchmark.agreement({1, 2, 3, 4}, {1, 2})
    assert said == "precision 1.00, recall 0.50 (2 found, 4 listed)"


def test_findings_are_counted_by_function_and_aliases_by_name(benchmark, tmp_path):
    (tmp_path / "a.py").write_text("def f(x):\n    x.item()\n    x.item()\n", encoding="utf-8")
    (tmp_path / "b.py").write_text("from a import f\n", encoding="utf-8")
    report = scan.scan(tmp_path, ["a:f"])
    assert benchmark.found(report, tmp_path) == {("a.py", "f", "item"): "path", ("b.py", "f", "alias"): "off"}
