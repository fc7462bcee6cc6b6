"""`torchport scan`: its lines, its formats, its exit code."""

import json
import os
import sys
from pathlib import Path

import pytest
from fakes import sarif

CODE = """\
import torch
def run(x: torch.Tensor):
    torch.cuda.set_device(0)
    return x.to("cuda")
def other(x: torch.Tensor):
    return x[x > 0]
"""


@pytest.fixture
def code(tmp_path):
    """A codebase of one module in the current folder."""
    (tmp_path / "up.py").write_text(CODE, encoding="utf-8")


def test_what_the_entry_leads_to_is_listed_and_counted(torchport, code, capsys):
    code, out, _ = torchport("scan", ".", "--entry", "up:run", capsys=capsys)
    assert (code, out) == (
        0,
        [
            "up.py:3: PS102 cuda-call in run: torch.cuda.set_device(0) [covered by torch.cuda.set-device]",
            "up.py:4: PS103 cuda-device in run: 'cuda' [look at it]",
            "1 that the entry does not lead to: add --all",
            "2 on the inference path: 1 covered, 0 need a rewrite, 1 unknown",
        ],
    )


def test_the_rest_is_listed_on_demand(torchport, code, capsys):
    code, out, _ = torchport("scan", ".", "--entry", "up:run", "--all", capsys=capsys)
    assert code == 0 and out[2] == "up.py:6: PS403 mask-index in other: x[x > 0] [not reached; needs a patch (hours)]"


def test_what_needs_a_patch_on_the_path_is_exit_code_1(torchport, code, capsys):
    code, out, _ = torchport("scan", "up.py", "--entry", "up:other", capsys=capsys)
    assert (code, out[-1]) == (1, "1 on the inference path: 0 covered, 1 needs a rewrite, 0 unknown")
    code, out, _ = torchport("scan", ".", capsys=capsys)
    assert (code, out[-1]) == (1, "3 outside training: 1 covered, 1 needs a rewrite, 1 unknown")


def test_json_has_all_that_a_draft_of_a_patch_needs(torchport, code, capsys):
    code, out, _ = torchport("scan", ".", "--entry", "up:other", "--json", capsys=capsys)
    data = json.loads("\n".join(out))
    [row] = data["findings"]
    assert code == 1 and {key: row[key] for key in ("rule", "kind", "file", "line", "target", "draft", "verdict")} == {
        "rule": "PS403",
        "kind": "mask-index",
        "file": "up.py",
        "line": 6,
        "target": "up:other",
        "draft": "rewrite",
        "verdict": "rewrite",
    }
    assert (row["reach"], row["covered_by"], row["effort"]) == ("path", [], "hours")
    assert (data["files"], data["lines"], data["entries"]) == (1, 7, ["up:other"])
    assert data["count"].startswith("1 on the inference path")


GUARDED = """\
import torch
import torch.distributed as dist
class Net(torch.nn.Module):
    def forward(self, x):
        if self.world_size > 1:
            dist.barrier()
        if x.is_cuda:
            torch.cuda.synchronize()
        return x
"""


def test_what_is_guarded_is_listed_by_its_guard_and_fails_nothing(torchport, capsys, tmp_path):
    (tmp_path / "up.py").write_text(GUARDED, encoding="utf-8")
    code, out, _ = torchport("scan", ".", "--entry", "up:Net", capsys=capsys)
    assert (code, out) == (
        0,
        [
            "only under a process group:",
            "  up.py:6: PS301 process-group in Net.forward: dist.barrier() [needs a patch (hours)]",
            "only on CUDA:",
            "  up.py:8: PS102 cuda-call in Net.forward: torch.cuda.synchronize() [covered by torch.cuda.synchronize]",
            "2 on the inference path: 0 covered, 0 need a rewrite, 0 unknown, "
            "1 only under a process group, 1 only on CUDA",
        ],
    )


def test_json_has_a_finding_in_each_line(torchport, code, capsys):
    _, out, _ = torchport("scan", ".", "--json", capsys=capsys)
    rows = [json.loads(line.removesuffix(",")) for line in out[1:-1]]
    assert [row["rule"] for row in rows] == ["PS102", "PS103", "PS403"] and out[-1] == "]}"
    assert json.loads("\n".join(out))["findings"] == rows


def test_a_log_says_that_the_scan_began_and_how_far_it_is(torchport, capsys, caplog, tmp_path, monkeypatch):
    monkeypatch.setattr("torchport.porting.scan.scanning._NOTED", 2)
    for name in "abcde":
        (tmp_path / f"{name}.py").write_text(CODE, encoding="utf-8")
    torchport("scan", ".", capsys=capsys)
    said = [
        "scan ...",
        "scan: 2 of 5 files, 6 findings so far",
        "scan: 4 of 5 files, 12 findings so far",
        "scan: what runs ...",
    ]
    assert caplog.messages == said


def test_sarif_is_what_its_schema_accepts(torchport, code, capsys):
    _, out, _ = torchport("scan", ".", "--sarif", capsys=capsys)
    log = json.loads("\n".join(out))
    sarif.check(log)
    [run] = log["runs"]
    assert [(one["ruleId"], one["level"]) for one in run["results"]] == [
        ("PS102", "note"),
        ("PS103", "warning"),
        ("PS403", "error"),
    ]
    assert [rule["name"] for rule in run["tool"]["driver"]["rules"]] == ["cuda-call", "cuda-device", "mask-index"]
    assert run["tool"]["driver"]["rules"][0]["help"]["text"].endswith("See: torchport explain PS102")


def test_a_report_is_written_in_the_format_of_its_ending(torchport, code, capsys, tmp_path):
    for name in ("out.json", "out.sarif", "out.txt"):
        assert torchport("scan", "up.py", "--report", name, capsys=capsys)[0] == 1
    assert len(json.loads((tmp_path / "out.json").read_text())["findings"]) == 3
    assert json.loads((tmp_path / "out.sarif").read_text())["version"] == "2.1.0"
    assert (tmp_path / "out.txt").read_text().count("\n") == 4


def test_a_report_that_cannot_be_written_is_refused_before_the_scan(torchport, code, capsys):
    exit_code, _, err = torchport("scan", "absent", "--report", "out.xml", capsys=capsys)
    assert exit_code == 2 and err == [
        "error[TP107] --report out.xml: '.xml' is the ending of no format. "
        "Known: .txt (text), .json (json), .sarif (sarif)."
    ]
    exit_code, _, err = torchport("scan", ".", "--report", "absent/out.json", capsys=capsys)
    assert exit_code == 2 and err[0].startswith("error[TP604] --report absent/out.json: ")


def test_what_is_not_there_is_refused(torchport, code, capsys):
    exit_code, _, err = torchport("scan", "absent", capsys=capsys)
    said = "error[TP107] torchport scan absent: There is no such folder or file. Name the codebase's folder."
    assert (exit_code, err) == (2, [said])
    exit_code, _, err = torchport("scan", ".", "--entry", "up:runs", capsys=capsys)
    assert exit_code == 2 and err[0].startswith("error[TP106] --entry up:runs: 'up' has no 'runs'. Did you mean 'run'?")


def test_a_file_that_cannot_be_read_is_listed_and_does_not_fail(torchport, capsys, tmp_path):
    (tmp_path / "old.py").write_text('print "x"\n', encoding="utf-8")
    code, out, _ = torchport("scan", ".", capsys=capsys)
    assert (code, out) == (
        0,
        [
            "old.py:1: PS902 python-2: It is written for Python 2",
            "0 outside training: 0 covered, 0 need a rewrite, 0 unknown",
        ],
    )


def test_control_characters_of_a_file_do_not_reach_the_terminal(torchport, capsys, tmp_path):
    (tmp_path / "up.py").write_text("import torch\ndef f(x):\n    x['\x1b[31m'].item()\n", encoding="utf-8")
    _, out, _ = torchport("scan", ".", capsys=capsys)
    assert "\x1b" not in "".join(out)


def test_a_pack_of_ones_own_covers_too(torchport, code, capsys, tmp_path):
    folder = tmp_path / "pack" / "patches" / "up"
    folder.mkdir(parents=True)
    (folder / "all.yaml").write_text(
        "- id: up.other\n  target: up:other\n  replace: all.py:put\n  why: A test.\n  reported: 'none: a test'\n"
        "  until: never\n  fits: {up: '*'}\n  equivalence: bitwise\n",
        encoding="utf-8",
    )
    (folder / "all.py").write_text("def put(x): return x\n", encoding="utf-8")
    exit_code, out, _ = torchport("scan", "up.py", "--entry", "up:other", "--path", "pack", capsys=capsys)
    assert exit_code == 0 and out[0].endswith("[covered by up.other]")


def test_a_folder_without_python_is_refused(torchport, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    code, out, err = torchport("scan", "empty", capsys=capsys)
    said = "error[TP107] torchport scan empty: There is no Python file in it. Name the codebase's folder."
    assert (code, out, err) == (2, [], [said])


def test_an_entry_whose_file_cannot_be_read_is_refused_with_the_reason(torchport, capsys, tmp_path):
    (tmp_path / "src/up").mkdir(parents=True)
    (tmp_path / "src/up/net.py").write_text("x = 1\ndef f(:\n", encoding="utf-8")
    code, out, err = torchport("scan", ".", "--entry", "up.net:Net", capsys=capsys)
    version = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    said = f"Its file src/up/net.py:2 could not be read. {version} cannot read it: invalid syntax. Mend the file: "
    expected = (2, [], [f"error[TP107] --entry up.net:Net: {said}torchport explain PS901."])
    assert (code, out, err) == expected
    code, out, err = torchport("scan", ".", "--entry", "up.no", "--entry", "up.net:Net", capsys=capsys)
    assert (code, out, err) == expected, "before entries with other mistakes"


IMPORTS = """\
import torch, timmy.layers, beside
from . import other
try:
    import flashy
except ImportError:
    flashy = None
if __name__ == "__main__":
    import guarded
def run(x):
    from later.on import name
    return name(x)
def unused(x):
    import never
"""


def test_absent_packages_that_the_path_imports_are_named(torchport, tmp_path, capsys):
    (tmp_path / "up.py").write_text(IMPORTS, encoding="utf-8")
    (tmp_path / "beside.py").write_text("", encoding="utf-8")
    said = "install it, or stub it and rewrite what calls it"
    for path in (".", "up.py"):
        _, out, _ = torchport("scan", path, "--entry", "up:run", capsys=capsys)
        assert sorted(out[:-1]) == [
            f"later is not installed here (up.py:10): {said}",
            f"timmy is not installed here (up.py:1): {said}",
        ]
    _, out, _ = torchport("scan", ".", "--entry", "up:run", "--json", capsys=capsys)
    assert {"package": "timmy", "file": "up.py", "line": 1} in json.loads("\n".join(out))["absent"]


def test_a_package_that_a_patch_stubs_is_not_named(torchport, tmp_path, capsys):
    (tmp_path / "up.py").write_text("import torch, timmy\ndef run(x):\n    return x\n", encoding="utf-8")
    patches = tmp_path / "pack/patches/up"
    patches.mkdir(parents=True)
    entry = (
        "- {id: up.timmy, target: 'timmy:x', stub: {package: timmy, importers: [up]}, why: w, reported: 'none: r', "
        "until: never, fits: {torch: '*'}, equivalence: bitwise, plumbing: true}\n"
    )
    (patches / "imports.yaml").write_text(entry, encoding="utf-8")
    _, out, _ = torchport("scan", "up.py", "--entry", "up:run", "--path", "pack", capsys=capsys)
    assert out == ["0 on the inference path: 0 covered, 0 need a rewrite, 0 unknown"]


def test_two_formats_are_refused(torchport, code, capsys):
    code, out, error = torchport("scan", ".", "--json", "--sarif", capsys=capsys)
    assert (code, out) == (2, [])
    assert error == [
        "error[TP107] --json --sarif: They are two formats. Leave one out, or write it to a file: --report."
    ]


def test_a_name_that_is_no_utf_8_is_in_every_format(torchport, tmp_path, capsys):
    (tmp_path / "code").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path / "code") + b"/\xff.py")).write_text(
        "import torch\n\ntorch.zeros(1).cuda()\n"
    )
    for flags in ((), ("--json",), ("--sarif",)):
        code, out, err = torchport("scan", "code", *flags, capsys=capsys)
        assert (code, err) == (1, []) or (code, err) == (0, [])
    assert any('"uri": "code/%FF.py"' in line for line in out)
