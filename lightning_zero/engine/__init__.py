"""ZeRO over torch, without Lightning."""
