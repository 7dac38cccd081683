"""Answers of a given form: JSON schemas, patterns and grammars, made into the tokens that may come next."""
