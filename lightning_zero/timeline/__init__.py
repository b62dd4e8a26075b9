"""Records one training step on every rank and draws it."""
