"""The host's planner for a GPU, compiled by another process before a plan needs it."""
