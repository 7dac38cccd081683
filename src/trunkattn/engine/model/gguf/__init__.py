"""GGUF files: their header, and what a model takes from it."""
