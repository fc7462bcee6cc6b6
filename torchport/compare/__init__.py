"""Two runs side by side: what made them differ, and how alike their frames and latents are."""
