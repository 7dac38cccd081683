"""The endpoints that generate: what each answers, and how answers are streamed."""
