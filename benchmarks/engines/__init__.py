"""Whole engines: vLLM, SGLang, and the embedded engine."""
