"""What a model's family offers: its stages as plain verbs over tensors, and a recorder of their calls."""
