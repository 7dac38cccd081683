"""`trunkattn doctor`: what is tried on this machine, and how that is reported."""
