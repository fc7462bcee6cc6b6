"""What a pack declares: its entries, the functions beside them, and the versions that they fit."""
