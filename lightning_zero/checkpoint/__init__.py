"""Checkpoints: names and full shapes, whatever the stage and the number of ranks."""
