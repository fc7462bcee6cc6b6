"""The folder of a pack that drafts are written to: never an upstream's own, and nothing in it is written over."""

from __future__ import annotations

import ast
import dataclasses
import os
import shlex
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from torchport.errors import OutputError, TakenNameError
from torchport.files import atomic, folder
from torchport.files.folder import as_named
from torchport.source import parsing
from torchport.source.bindings import DEFINITIONS


@dataclasses.dataclass(frozen=True)
class Piece:
    """A text to write into a file of a pack."""

    file: str  #: Its path below the pack's folder.
    text: str
    head: str = ""  #: What stands before the text in a new file.
    mode: str = "append"  #: For a file that exists: `append` adds the text, `new` refuses, `whole` replaces the file.


@dataclasses.dataclass(frozen=True)
class Home:
    root: Path

    def text(self, file: str) -> str:
        """Returns the text of a file of the pack, empty if it does not exist; raises if it cannot be read."""
        path = self.root / file
        try:
            return folder.text(path) if os.path.lexists(path) else ""
        except (OSError, UnicodeDecodeError) as error:
            fact = f"It cannot be read: {getattr(error, 'strerror', None) or error}"
            raise OutputError(as_named(path), fact, "Mend the file first") from error

    def write(self, pieces: Sequence[Piece]) -> list[str]:
        """Writes all pieces, or none if a piece cannot be added; returns a line to print for each file."""
        texts = [self.text_with(piece) for piece in pieces]
        lines = []
        for piece, text in zip(pieces, texts, strict=True):
            path = self.root / piece.file
            word = "appended to" if path.exists() else "wrote"
            atomic.make_folder(path.parent)
            atomic.write_text(path, text)
            lines.append(f"{word:11} {as_named(path)}")
        return lines

    def text_with(self, piece: Piece) -> str:
        """Returns the text of a piece's file with the piece in it; refuses a function or class that the file has."""
        path = folder.inside(self.root, self.root / piece.file)
        before = self.text(piece.file)
        if piece.mode == "whole":
            return piece.text
        if not os.path.lexists(path):
            return piece.head + piece.text
        if piece.mode == "new":
            fact = "It is there already"
            raise TakenNameError(as_named(path), fact, "Choose another name, or delete it first")
        if path.suffix != ".py":
            return f"{before.rstrip()}\n\n{piece.text}"
        tree = parsing.tree(before, as_named(path))
        known = {node.name: node.lineno for node in tree.body if isinstance(node, DEFINITIONS)}
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        known |= {name.id: name.lineno for name in names if name.col_offset == 0}  # variables of the module
        for node in ast.parse(piece.text).body:
            if isinstance(node, DEFINITIONS) and node.name in known:
                place = f"{as_named(path)}:{known[node.name]}"
                raise TakenNameError(place, f"'{node.name}' is there already", "Choose another file with --file")
        return f"{before.rstrip()}\n\n\n{piece.text}"


def home(out: Path, upstreams: Sequence[Path], flag: str = "--out") -> Home:
    """Returns the folder of a pack that drafts go to; refuses one in `upstreams` or among installed packages."""
    place, root = f"{flag} {out}", folder.expand_home(str(out)).absolute()
    # Links are followed: a link into an upstream has another path.
    paths = [Path(os.path.realpath(root / part)) for part in ("", "patches", "configs", "tests")]
    for upstream in upstreams:
        if any(path.is_relative_to(os.path.realpath(upstream)) for path in paths):
            fact = f"It lies in the upstream at {as_named(upstream)}, which is never written to"
            raise OutputError(place, fact, "Name a folder of your own")
    installed = [Path(os.path.realpath(sysconfig.get_paths()[key])) for key in ("purelib", "platlib", "stdlib")]
    names = {name for path in paths for name in path.parts}
    is_inside = any(path.is_relative_to(known) for path in paths for known in installed)
    if is_inside or names & {"site-packages", "dist-packages"}:
        fact = "It lies among installed packages, where nothing is written"
        raise OutputError(place, fact, "Name a folder of your own")
    if root.exists() and not root.is_dir():
        raise OutputError(place, "It is a file, not a folder", "Name a folder of your own")
    existing = next(folder for folder in (root, *root.parents) if os.path.lexists(folder))
    if not existing.is_dir():
        raise OutputError(place, f"{as_named(existing)} is no folder", "Name a folder of your own")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(place, f"You may not write in {as_named(existing)}", "Name a folder that can be written")
    return Home(root)


def check_command(out: Path, upstream_path: Path | str | None, *names: str) -> str:
    """Returns the command that checks a pack's patches: `torchport check --static NAME --path OUT`."""
    flags = ["--upstream-path", str(upstream_path)] if upstream_path is not None else []
    return shlex.join(["torchport", "check", "--static", *names, "--path", str(out), *flags])
