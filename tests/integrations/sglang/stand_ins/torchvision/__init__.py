"""Stands in for torchvision, which PyPI has as a CUDA build alone. SGLang imports it for models of images, and these
tests run none: a call raises."""

from . import io, ops, transforms  # noqa: F401

__version__ = "0.0.0"
