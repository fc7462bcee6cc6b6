"""What upstream's source says about a target, read without importing upstream."""
