"""The sections of the performance page, by topic."""
