"""The folder that patches, model cards and jobs lie in."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchport.config.document import Document, overridden, read_document, validated
from torchport.errors import BadValueError, DataFolderError, UnknownNameError, nearest
from torchport.files.folder import has_file, has_folder, inside

if TYPE_CHECKING:  # where patches alone are read, no model of a card is made
    from torchport.config.card import Card, Job


@dataclasses.dataclass(frozen=True)
class Pack:
    """A folder with `patches/` and `configs/` in it."""

    root: Path

    @property
    def patches(self) -> Path:
        """The folder of patch files, one folder per upstream package."""
        return self.root / "patches"

    def models(self) -> list[str]:
        """Returns the names of the model cards, sorted."""
        return sorted(file.stem for file in (self.root / "configs" / "models").glob("*.yaml"))

    def card(self, name: str) -> tuple[Card, Document]:
        """Returns a model card and the document it was read from.

        Raises:
            UnknownNameError: No card has this name.
            ConfigError: The card has a mistake, by file and line.
        """
        from torchport.config.card import Card

        if name not in self.models():
            fact = f"There is no model card '{name}' in {self.root / 'configs' / 'models'}"
            raise UnknownNameError(f"--model {name}", fact, nearest(name, self.models()), name=name)
        document = self.read(self.root / "configs" / "models" / f"{name}.yaml")
        card = validated(Card, document)
        if card.model != name:
            raise BadValueError(document.place(["model"]), f"'model' is '{card.model}'", f"It must be '{name}'")
        return card, document

    def family_file(self, card: Card, place: str) -> Path:
        """Returns the Python file of a card's family, beside its patches.

        Args:
            card: The model card.
            place: Where the card names it, for the error.

        Raises:
            UnknownNameError: There is no such file.
        """
        file = self.patches / f"{card.family}.py"
        if not has_file(file):
            known = [f"{other.parent.name}/{other.stem}" for other in self.patches.glob("*/*stages.py")]
            fact = f"'family' is '{card.family}', and there is no {file.relative_to(self.root)} in {self.root}"
            raise UnknownNameError(place, fact, nearest(card.family, known), name=card.family)
        return inside(self.root, file)

    def job(self, name: str, overrides: Sequence[str] = ()) -> tuple[Job, Document]:
        """Returns a config, from a path or from this pack's `configs/`, with `a.b=c` overrides applied.

        Raises:
            UnknownNameError: No such file.
            ConfigError: The file or an override has a mistake.
        """
        from torchport.config.card import Job

        file = self._job_file(name)
        document = self.read(file)
        for override in overrides:
            document = overridden(document, override)
        return validated(Job, document), document

    def _job_file(self, name: str) -> Path:
        here = Path(name)
        # A bare name means one of the pack's configs; a path means that file alone.
        candidates = [self.root / "configs" / file for file in (name, f"{name}.yaml") if here.name == name]
        for file in (here, self.root / here, *candidates):
            if has_file(file):
                return file
        configs = [f"configs/{file.name}" for file in (self.root / "configs").glob("*.yaml")]
        raise UnknownNameError(
            f"--config {name}", f"There is no file '{name}', here or in {self.root}", nearest(name, configs), name=name
        )

    def read(self, file: Path) -> Document:
        """Returns a YAML document; errors name it by its path from the pack or from the current folder."""
        file = inside(self.root, file) if file.is_relative_to(self.root) else file
        bases = [base for base in (Path.cwd(), self.root) if file.is_absolute() and file.is_relative_to(base)]
        return read_document(file, str(file.relative_to(bases[0])) if bases else None)


def find_pack(path: str | None) -> Pack:
    """Returns the pack: `--path`, then `TORCHPORT_PATH`, then the checkout, then the wheel's own copy.

    The current folder is never used by default: its content may be somebody else's.

    Raises:
        DataFolderError: The folder that was named has no `patches/` and `configs/`, or none was found.
    """
    package = Path(__file__).resolve().parent.parent
    for source, value in (("--path", path), ("TORCHPORT_PATH", os.environ.get("TORCHPORT_PATH") or None)):
        if value is not None:
            if not value or not _is_pack(Path(value)):
                raise DataFolderError(
                    f"{source} {value}",
                    "There is no folder here with patches/ and configs/ in it",
                    "Name the folder that holds both",
                )
            return Pack(Path(value).resolve())
    for folder in (package.parent, package / "_data"):
        if _is_pack(folder):
            return Pack(folder)
    raise DataFolderError(
        str(package),
        "Neither a checkout nor the wheel's copy of patches/ and configs/ is here",
        "Reinstall torchport, or name a folder with --path",
    )


def _is_pack(folder: Path) -> bool:
    return has_folder(folder / "patches") and has_folder(folder / "configs" / "models")
