"""."""

from torchport.config.document import Document, Frozen, overridden, parse_document, read_document, validated

__all__ = ["Document", "Frozen", "overridden", "parse_document", "read_document", "validated"]
