"""The CPU backend: tasks dealt to threads, register tiles, conversion of narrow dtypes."""
