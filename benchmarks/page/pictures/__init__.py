"""Pictures, drawn from results."""
