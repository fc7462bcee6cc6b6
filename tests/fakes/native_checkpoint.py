"""The encoders of a card whose upstream is a repository of its own, tiny, in the layout of its checkpoint."""

from pathlib import Path

import torch

from torchport.config.card import Card
from torchport.load import tiny

ENCODERS = ("text_encoder", "text_encoder_2", "vision_encoder")
NAMES = (*ENCODERS, "tokenizer", "tokenizer_2", "image_processor", "glyph_encoder")


def write(card: Card, folder: Path) -> Path:
    """Writes all components but the networks, which need a checkout."""
    for name in NAMES[:-1]:
        tiny._component(card, {}, name).save_pretrained(folder / card.folder(name, None))
    encoder = tiny._component(card, {}, "text_encoder_2").get_encoder()
    file = glyphs(card, folder)
    file.parent.mkdir(parents=True)
    torch.save({name: tensor.clone() for name, tensor in encoder.state_dict().items()}, file)
    return folder


def glyphs(card: Card, folder: Path) -> Path:
    """Returns the file of `torch.save`."""
    component = card.components["glyph_encoder"]
    assert component.file is not None
    return folder / card.folder("glyph_encoder", None) / component.file
