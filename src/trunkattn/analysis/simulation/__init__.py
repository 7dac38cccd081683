"""The engine's scheduler and cache over a log, without a model, and what its steps take."""
