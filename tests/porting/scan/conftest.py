"""Codebases for the scanner, written from their files' texts."""

import textwrap

import pytest

from torchport.porting.scan import scanning as scan


@pytest.fixture
def codebase(tmp_path):
    """Writes files, by path and text, and returns their folder."""

    def write(files):
        for name, text in files.items():
            file = tmp_path / "code" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text), encoding="utf-8")
        return tmp_path / "code"

    return write


@pytest.fixture
def scanned(codebase):
    """Scans files; returns the report."""

    def run(files, *entries, folders=()):
        return scan.scan(codebase(files), entries, folders)

    return run


@pytest.fixture
def kinds(scanned):
    """Scans one module; returns the kinds that are found, with the lines."""

    def run(text):
        report = scanned({"up.py": text})
        return [(one.kind, one.line) for one in report.findings]

    return run
