"""Answers: sampled tokens become text and log-probabilities."""
