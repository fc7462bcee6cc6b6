"""What runs have written, and how far one tensor is from another."""

from safetensors.torch import load_file

from torchport import save


def tensor_of(folder, stage="denoise", name="latents"):
    return load_file(save.file_of(folder, stage))[name]


def latents_of(folder):
    return tensor_of(folder)


def frames_of(folder):
    return tensor_of(folder, "decode", "frames")


def bits(folder, stage):
    """Returns the checksum of a stage's artefact."""
    return save.read_manifest(save.file_of(folder, stage)).sha256


def difference(ours, reference):
    """Returns max|a - b| / max|b|, of a reference whose size makes that mean something."""
    largest = reference.abs().max().item()
    assert 0.5 <= largest <= 20
    return (ours.double() - reference.double()).abs().max().item() / largest
