"""The scheduler: which tokens a step computes. No file here imports torch."""
