from ._absent import absent as __getattr__  # noqa: F401
