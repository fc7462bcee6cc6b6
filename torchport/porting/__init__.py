"""What a porter needs before the first run: what will not port, drafts, and what stops the trace."""
