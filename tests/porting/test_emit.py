"""`torchport scan --emit`: drafts of patches for what no patch covers, and what is left to a person."""

import functools
import os
import sys
import textwrap

import pytest
import yaml

CODE = {
    "up/__init__.py": "",
    "up/net.py": """
        import torch
        from up.attention import attend
        from up.group import rank
        MAJOR = torch.cuda.get_arch_list()
        class Net(torch.nn.Module):
            def forward(self, x: torch.Tensor):
                if x.sum() > 0:
                    x = x + 1
                top = x.max().item()
                if x.min() > top:
                    return x
                return attend(x)[rank() :]
        """,
    "up/attention.py": """
        from flash_attn import flash_attn_func
        def attend(x):
            return flash_attn_func(x, x, x)
        """,
    "up/group.py": """
        import torch.distributed as dist
        def rank():
            return dist.get_rank()
        """,
}


@pytest.fixture
def emit(tmp_path, torchport, capsys):
    """Writes a codebase, and drafts its patches; returns the exit code, the output and the errors."""

    def run(*flags, out="pack", files=CODE, entry="up.net:Net"):
        for name, text in files.items():
            file = tmp_path / "code" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text), encoding="utf-8")
        words = ["scan", "code", "--emit", out, *(["--entry", entry] if entry else []), *flags]
        return functools.partial(torchport, capsys=capsys)(*words)

    return run


def files_in(folder):
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def entries(tmp_path, package="up"):
    folder = tmp_path / "pack" / "patches" / package
    files = (file for file in sorted(folder.glob("*.yaml")) if file.name != "lock.yaml")
    return {one["id"]: one for file in files for one in yaml.safe_load(file.read_text())}


def test_a_set_is_drafted_of_stubs_functions_and_statements(emit, tmp_path, torchport, capsys):
    code, out, error = emit()
    assert (code, error) == (1, [])
    assert out == [
        "10 on the inference path: 0 covered, 8 need a rewrite, 2 unknown",
        "drafted     5 patches in pack/patches, and 5 tests in pack/tests",
        "fill in     patches/up/attention.py:attend, patches/up/group.py:rank, patches/up/net.py:forward_8, "
        "patches/up/net.py:forward_10",
        "            and why, equivalence and must_be_called of their entries, and the arguments in their tests",
        "left        code/up/net.py:5: PS101 cuda-import in <module>: it runs while its module is imported, where no "
        "patch of a function reaches it",
        "left        code/up/net.py:11: PS401 branch in Net.forward: The statement on line 11 of Net.forward cannot be "
        "rewritten (up/net.py:7)",
        "unsure      2 that may be harmless: torchport trace shows which of them stop",
        "list        up/attention, up/group, up/imports, up/net under 'patches' of the card, for the stages that need "
        "them",
        "then        torchport check --static up --path pack --upstream-path code",
    ]
    kinds = {
        id: next(key for key in ("stub", "replace", "rewrite") if key in one) for id, one in entries(tmp_path).items()
    }
    assert kinds == {
        "up.flash-attn": "stub",
        "up.attend": "replace",
        "up.rank": "replace",
        "up.net-forward-8": "rewrite",
        "up.net-forward-10": "rewrite",
    }
    code, out, _ = torchport("check", "--static", "up", "--path", "pack", "--upstream-path", "code", capsys=capsys)
    assert code == 1 and all(" is a draft: " in line for line in out[:-1]) and out[-1] == "4 findings"
    assert "up" not in sys.modules and not (tmp_path / "code" / "patches").exists()


def test_what_is_there_is_named_in_one_line_and_left_as_it_is(emit, tmp_path):
    emit()
    before = files_in(tmp_path / "pack")
    code, out, error = emit()
    assert (code, error, files_in(tmp_path / "pack")) == (1, [], before)
    assert out[1] == (
        "there       5 patches already, left as they are: up.flash-attn, up.attend, up.rank, up.net-forward-8, "
        "up.net-forward-10"
    )
    assert not any(line.startswith(("drafted", "fill in", "list")) for line in out)


def test_a_later_draft_adds_to_the_files_that_are_there(emit, tmp_path):
    emit()
    before = files_in(tmp_path / "pack")
    text = CODE["up/group.py"] + "def size():\n            return dist.get_world_size()\n"
    net = CODE["up/net.py"].replace("rank() :", "rank() : size()").replace("import rank", "import rank, size")
    _, out, _ = emit(files={**CODE, "up/group.py": text, "up/net.py": net})
    assert out[1] == "drafted     1 patch in pack/patches, and 1 test in pack/tests"
    after = files_in(tmp_path / "pack")
    assert {name for name in after if after[name] != before.get(name)} == {
        "patches/up/group.py", "patches/up/group.yaml", "patches/up/lock.yaml", "tests/test_up_size.py",
    }  # fmt: skip
    assert after["patches/up/group.yaml"].startswith(before["patches/up/group.yaml"].rstrip())


def test_functions_of_one_name_in_two_modules_have_files_and_ids_of_their_own(emit, tmp_path):
    module = "import flash_attn\n\n\ndef attend(x):\n    return flash_attn.flash_attn_func(x, x, x)\n"
    net = "from up.a.attention import attend as a\nfrom up.b.attention import attend as b\n\n\ndef f(x):\n    a(b(x))\n"
    files = {"up/__init__.py": "", "up/net.py": net}
    files |= {f"up/{name}/__init__.py": "" for name in "ab"} | {f"up/{name}/attention.py": module for name in "ab"}
    code, out, error = emit(files=files, entry="up.net:f")
    assert (code, error) == (0, []) and out[1].startswith("drafted     3 patches")
    drafted = entries(tmp_path)
    assert set(drafted) == {"up.attend-a-attention", "up.attend-b-attention", "up.flash-attn"}
    assert drafted["up.flash-attn"]["stub"]["importers"] == ["up.a.attention", "up.b.attention"]
    assert (tmp_path / "pack/tests/test_up_a_attention_attend.py").exists()


def test_what_runs_at_import_is_left_to_a_person(emit):
    code, out, _ = emit(
        files={"up.py": "import torch.distributed as dist\ndist.init_process_group('nccl')\n"}, entry=""
    )
    assert code == 1
    assert out[1] == (
        "left        code/up.py:2: PS101 cuda-import in <module>: it runs while its module is imported, where no patch "
        "of a function reaches it"
    )


def test_a_package_that_is_installed_is_left_to_a_person_without_a_flag(emit, tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    _, out, _ = emit()
    (left,) = [line for line in out if "PS201" in line]
    assert left == (
        "left        code/up/attention.py:2: PS201 kernel in <module>: The package flash_attn is installed, and a stub "
        "is for one that is not"
    )
    assert "--" not in left


def test_a_card_is_told_which_shipped_patches_it_needs(emit):
    net = "import torch\n\n\n@torch.autocast('cuda')\ndef f(x):\n    torch.cuda.synchronize()\n    return x\n"
    code, out, _ = emit(files={"up.py": net}, entry="up:f")
    assert (code, out) == (0, [
        "2 on the inference path: 2 covered, 0 need a rewrite, 0 unknown",
        "list        torch/autocast, torch/cuda under 'patches' of the card, for the stages that need them",
    ])  # fmt: skip


def test_a_patch_of_another_name_that_takes_the_function_is_there_already(emit, tmp_path):
    emit()
    file = tmp_path / "pack" / "patches" / "up" / "group.yaml"
    file.write_text(file.read_text().replace("id: up.rank", "id: up.mine"))
    assert "there       5 patches already, left as they are: up.flash-attn, up.attend, up.mine" in emit()[1][1]


def test_nothing_is_written_into_the_codebase_or_site_packages(emit, tmp_path):
    import sysconfig

    def refusal(out):
        code, _, (line,) = emit(out=out)
        assert code == 2
        return line

    assert refusal("code/mine") == (
        "error[TP604] --emit code/mine: It lies in the upstream at code, which is never written to. Name a folder of "
        "your own."
    )
    (tmp_path / "link").symlink_to(tmp_path / "code")
    assert "It lies in the upstream at" in refusal("link/mine")
    assert "It lies among installed packages" in refusal(sysconfig.get_paths()["purelib"])
    (tmp_path / "plain").write_text("")
    assert refusal("plain") == "error[TP604] --emit plain: It is a file, not a folder. Name a folder of your own."
    assert refusal("plain/pack") == "error[TP604] --emit plain/pack: plain is no folder. Name a folder of your own."


def test_a_folder_that_cannot_be_written_is_refused_by_the_flag(emit, tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir()
    access = os.access
    monkeypatch.setattr("os.access", lambda path, *rest: "locked" not in str(path) and access(path, *rest))
    code, out, error = emit(out="locked/pack")
    assert (code, out, error) == (2, [], [
        "error[TP604] --emit locked/pack: You may not write in locked. Name a folder that can be written."
    ])  # fmt: skip


def test_a_format_for_the_terminal_and_a_draft_are_refused_together(emit, tmp_path):
    code, out, error = emit("--json")
    assert (code, out, error) == (2, [], [
        "error[TP107] --emit pack: It prints what it drafts, and --json prints the findings. Write these to a file: "
        "--report findings.json."
    ])  # fmt: skip
    assert not (tmp_path / "pack").exists()
    assert emit("--report", "findings.json")[0] == 1 and (tmp_path / "findings.json").exists()


def test_packages_below_src_are_drafted(emit, tmp_path):
    files = {f"src/{name}": text for name, text in CODE.items()}
    _, out, _ = emit(files=files)
    assert not [line for line in out if "There is no module" in line]
    assert out[-1].endswith("check --static up --path pack --upstream-path code/src")
    assert {"up.flash-attn", "up.attend", "up.rank", "up.net-forward-8"} <= set(entries(tmp_path))


def test_what_only_runs_under_a_process_group_or_on_cuda_is_not_drafted(emit, tmp_path):
    guarded = """
        import torch
        from up.group import rank
        class Net(torch.nn.Module):
            def forward(self, x: torch.Tensor):
                if self.world_size > 1:
                    x = x[rank() :]
                if x.device.type == "cuda":
                    x = x * x.max().item()
                x = x[x > 0]
                return x
        """
    code, out, _ = emit(files={**CODE, "up/net.py": guarded})
    assert code == 0, out
    assert "2 only under a process group" in out[0] and "1 only on CUDA" in out[0]
    drafted = [(one["target"], one["rewrite"]["match"]) for one in entries(tmp_path).values()]
    assert drafted == [("up.net:Net.forward", "x = x[x > 0]")]
