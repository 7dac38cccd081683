"""What a step costs on a card, from the card's record and the model's size."""
