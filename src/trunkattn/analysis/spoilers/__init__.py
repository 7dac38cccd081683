"""Fields that keep prompts from sharing what follows them."""
