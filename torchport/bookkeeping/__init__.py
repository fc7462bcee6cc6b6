"""What a run keeps of itself: the artefacts of its stages, manifests, unfinished latents, seconds."""
