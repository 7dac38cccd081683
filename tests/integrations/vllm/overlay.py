"""The Python of one version of vLLM over the compiled parts of another, for versions without a package for CPUs.

    python overlay.py WHEEL SITE_PACKAGES FOLDER

FOLDER becomes what PYTHONPATH needs: the wheel's files but for its compiled ones, and those that SITE_PACKAGES has.
"""

import shutil
import sys
import zipfile
from pathlib import Path


def overlay(wheel: Path, installed: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if not name.endswith(".so")])
    for library in installed.glob("vllm/**/*.so"):
        to = folder / library.relative_to(installed)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, to)


if __name__ == "__main__":
    overlay(*map(Path, sys.argv[1:]))
