from ._absent import ImageReadMode  # noqa: F401
from ._absent import absent as __getattr__  # noqa: F401
