"""`trunkattn demo`: a shop's conversations, how they are measured, and what is shown of that."""
