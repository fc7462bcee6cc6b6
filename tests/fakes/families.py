"""The shipped families as modules: the same objects that a task gets."""

from pathlib import Path

from torchport.patch.declared import replacement

PATCHES = Path(__file__).resolve().parents[2] / "patches"
HUNYUAN = PATCHES / "diffusers" / "hunyuan_video15_stages.py"
HYVIDEO = PATCHES / "hyvideo" / "stages.py"


def loaded(file):
    """Returns the module of a family's file."""
    return replacement.module_of(file, file.parent.name, str(file))
