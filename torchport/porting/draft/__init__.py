"""Drafts of a pack: a patch with its function, its tests and its lock row; a model card with its job and family."""
