"""Git repositories of a test's own, with their commits."""

import os
import subprocess

WHO = {"NAME": "a", "EMAIL": "a@example.org"}


def git(folder, *arguments):
    """Runs git as a user would, who has a name and no configuration, and returns what it prints."""
    who = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in WHO.items()}
    variables = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", **who}
    command = ["git", "-c", "init.defaultBranch=main", "-C", str(folder), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.strip()


def committed(folder, *files):
    """Commits files of a folder, all if none is named, and returns the commit; makes it a repository if it is none."""
    if not (folder / ".git").exists():
        git(folder, "init", "-q")
    git(folder, "add", *(files or ["-A"]))
    git(folder, "commit", "-qm", "a commit")
    return git(folder, "rev-parse", "HEAD")
