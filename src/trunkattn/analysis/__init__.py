"""What sharing prefixes is worth: logs and traces in, predicted times, spoilers and a report out. Needs no GPU."""
