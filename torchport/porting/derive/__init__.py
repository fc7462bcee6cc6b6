"""A model card that is derived from a pipeline of diffusers: it is tried with tiny weights."""

from torchport.porting.derive.derived import derived_card, ensure, pieces

__all__ = ["derived_card", "ensure", "pieces"]
