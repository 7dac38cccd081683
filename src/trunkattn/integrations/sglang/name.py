"""The back end's name in SGLang, and its logger."""

import logging
from typing import Final

NAME: Final = "trunk"

logger: Final = logging.getLogger("sglang.trunkattn")
