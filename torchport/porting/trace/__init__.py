"""What stops a network from being traced: every place in one go, from shapes alone."""
