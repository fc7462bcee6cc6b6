"""What a checkout's version is: its commit, and whether it has changes; nothing of the repository's is run."""

import os
import shutil
import subprocess
import sys

import pytest
from fakes.checkouts import committed, git

from torchport.processes.git import Revision, revision

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.fixture
def checkout(tmp_path):
    """A repository with a package `up` in it, committed."""
    (tmp_path / "up" / "inner").mkdir(parents=True)
    (tmp_path / "up" / "__init__.py").write_text("x = 1\n")
    (tmp_path / "up" / "inner" / "m.py").write_text("y = 2\n")
    (tmp_path / "up" / "link.py").symlink_to("__init__.py")
    (tmp_path / "alone.py").write_text("z = 3\n")
    (tmp_path / "README").write_text("read\n")
    committed(tmp_path)
    return tmp_path


def test_a_checkout_without_changes_is_its_commit(checkout):
    commit = git(checkout, "rev-parse", "HEAD")
    assert len(commit) == 40
    assert revision(checkout / "up") == Revision(commit)
    assert revision(checkout / "alone.py") == Revision(commit)
    assert str(revision(checkout / "up")) == f"commit {commit[:12]}"


@pytest.mark.parametrize(
    "change",
    [
        lambda up: (up / "inner" / "m.py").write_text("y = 3\n"),
        lambda up: (up / "inner" / "m.py").unlink(),
        lambda up: shutil.rmtree(up / "inner"),
        lambda up: [(up / "link.py").unlink(), (up / "link.py").symlink_to("inner/m.py")],
        lambda up: [(up / "link.py").unlink(), (up / "link.py").write_text("x = 1\n")],
        lambda up: [(up / "inner" / "m.py").unlink(), (up / "inner" / "m.py").mkdir()],
        lambda up: [(up / "inner" / "m.py").write_text("y = 3\n"), git(up, "add", "-A")],
        lambda up: [git(up, "update-index", "--assume-unchanged", "link.py"), (up / "link.py").unlink()],
    ],
)
def test_a_package_with_a_changed_file_is_dirty(checkout, change):
    change(checkout / "up")
    commit = git(checkout, "rev-parse", "HEAD")
    assert revision(checkout / "up") == Revision(commit, dirty=True)
    assert str(revision(checkout / "up")) == f"commit {commit[:12]} with changes"
    assert not revision(checkout / "alone.py").dirty


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "README").write_text("other\n"),
        lambda root: (root / "up" / "new.py").write_text("new\n"),
        lambda root: os.utime(root / "up" / "__init__.py", (1, 1)),
        lambda root: (root / "up" / "__init__.py").write_bytes(b"x = 1\r\n"),
        lambda root: (root / "up" / "__init__.py").chmod(0o755),
    ],
)
def test_what_is_no_change_of_the_packages_code_does_not_count(checkout, change):
    change(checkout)
    assert not revision(checkout / "up").dirty


def test_a_file_with_a_strange_name_is_compared(checkout):
    strange = checkout / "up" / "täg\n:(glob)*.py"
    strange.write_text("1\n")
    committed(checkout)
    assert not revision(checkout / "up").dirty
    strange.write_text("2\n")
    assert revision(checkout / "up").dirty


def test_a_work_tree_and_a_submodule_and_longer_hashes_have_their_commits(checkout, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    git(checkout, "worktree", "add", "-q", str(other / "tree"), "HEAD")
    assert revision(other / "tree" / "up") == revision(checkout / "up")
    git(other, "init", "-q", "--object-format=sha256", "long")
    shutil.copytree(checkout / "up", other / "long" / "up")
    committed(other / "long")
    now = revision(other / "long" / "up")
    assert now.commit is not None and len(now.commit) == 64 and not now.dirty
    git(other / "long", "rm", "-q", "--cached", "-r", "up/inner")
    git(other / "long", "update-index", "--add", "--cacheinfo", f"160000,{now.commit},up/sub")
    git(other / "long", "commit", "-qm", "two")
    assert not revision(other / "long" / "up").dirty


def test_a_folder_without_a_commit_says_why(tmp_path, checkout):
    assert revision(checkout / "up" / "absent") == Revision(None, reason="git does not track absent")
    outside = tmp_path / "new"
    (outside / "up").mkdir(parents=True)
    git(outside, "init", "-q")
    assert str(revision(outside / "up")) == "no commit (its repository has no commit yet)"


def test_a_folder_that_is_no_repository_has_no_commit(tmp_path):
    (tmp_path / "up").mkdir()
    assert str(revision(tmp_path / "up")) == "no commit (no git repository)"


def test_a_package_that_a_repository_around_it_does_not_know_has_no_commit(checkout):
    (checkout / ".venv" / "lib" / "pkg").mkdir(parents=True)
    (checkout / ".venv" / "lib" / "pkg" / "__init__.py").write_text("")
    assert revision(checkout / ".venv" / "lib" / "pkg") == Revision(None, reason="git does not track pkg")


def test_without_git_there_is_no_commit_and_the_current_folder_is_not_searched(checkout, monkeypatch):
    fake = checkout / "git"
    fake.write_text(f"#!{sys.executable}\nopen({str(checkout / 'ran')!r}, 'w')\n")
    fake.chmod(0o755)
    monkeypatch.chdir(checkout)
    for path in ("", ".", os.pathsep):
        monkeypatch.setenv("PATH", path)
        assert revision(checkout / "up") == Revision(None, reason="git is not installed")
    assert not (checkout / "ran").exists()


def test_this_users_git_variables_do_not_turn_it_to_another_repository(checkout, tmp_path_factory, monkeypatch):
    wanted = revision(checkout / "up")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.setenv(name, str(tmp_path_factory.mktemp("else")))
    assert revision(checkout / "up") == wanted


def test_nothing_that_a_repository_configures_is_run(checkout):
    """Each of these would leave a file. git's own commands do run the monitor and the filter, which shows the trap."""
    trap, ran = checkout / "trap.sh", checkout / "ran"
    trap.write_text(f"#!/bin/sh\necho $0 >> {ran}\ncat\n")
    trap.chmod(0o755)
    (checkout / ".gitattributes").write_text("*.py filter=trap diff=trap\n")
    committed(checkout, ".gitattributes")
    for key in (
        "core.fsmonitor", "core.pager", "core.editor", "core.sshCommand", "core.askPass", "core.gitProxy",
        "filter.trap.clean", "filter.trap.smudge", "filter.trap.process", "diff.trap.command", "diff.trap.textconv",
        "diff.external", "pager.ls-tree", "pager.rev-parse", "alias.ls-tree", "alias.rev-parse", "credential.helper",
    ):  # fmt: skip
        git(checkout, "config", key, f"!{trap}" if key.startswith("alias") else str(trap))
    for hook in ("post-index-change", "post-checkout", "reference-transaction"):
        shutil.copy(trap, checkout / ".git" / "hooks" / hook)
    (checkout / "up" / "inner" / "m.py").write_text("y = 3\n")
    assert revision(checkout / "up").dirty
    assert not ran.exists()
    subprocess.run(["git", "-C", str(checkout), "status"], capture_output=True, check=False)
    assert ran.exists()


def test_what_a_partial_clone_lacks_is_not_fetched(checkout):
    """git would ask the remote that promises the missing objects, by a command that the repository names."""
    ran = checkout / "ran"
    tree = git(checkout, "rev-parse", "HEAD:up")
    (checkout / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    for key, value in {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.url": f"ext::sh -c touch% {ran}",
        "remote.origin.promisor": "true",
        "protocol.ext.allow": "always",
    }.items():
        git(checkout, "config", key, value)
    assert revision(checkout / "up").commit is None
    assert not ran.exists()
    subprocess.run(["git", "-C", str(checkout), "ls-tree", "-r", "HEAD"], capture_output=True, check=False)
    assert ran.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_checkout_of_another_user_has_its_commit(checkout):
    for path in [checkout, *checkout.rglob("*")]:
        os.chown(path, 65534, 65534, follow_symlinks=False)
    refusal = subprocess.run(["git", "-C", str(checkout), "status"], capture_output=True, text=True, check=False)
    assert "dubious ownership" in refusal.stderr
    assert revision(checkout / "up").commit is not None
