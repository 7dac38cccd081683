"""The way from logits to tokens: what parameters change before the temperature, and the draw."""
