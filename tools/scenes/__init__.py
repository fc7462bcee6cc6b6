"""What the trained tiny weights draw: scenes, the words for them, their clips, and a judge of frames."""
