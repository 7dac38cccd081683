"""Prompts: texts and conversations become token ids, within limits of size and time."""
