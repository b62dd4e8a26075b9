"""A small GPT on Python's own source."""
