from .._absent import InterpolationMode  # noqa: F401
from .._absent import absent as __getattr__  # noqa: F401
