"""What a run records: the artefacts of its stages, manifests, unfinished latents, seconds."""
