"""Say what is missing from an environment made by ci/sglang_cpu.sh; run it with that environment's own Python.

    ENVIRONMENT/bin/python ci/sglang_cpu/check.py ci/sglang_cpu/requirements.txt

Exit status 1 and one line for each distribution that is absent, of another version, or has lost files.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path


def faults(requirements: str) -> list[str]:
    """One sentence for each pinned distribution that is not there as it was installed."""
    found = []
    pins = re.findall(r"^([\w.-]+)==(\S+)", requirements, re.MULTILINE)
    for name, version in [*pins, ("torch", None)]:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            found.append(f"{name} is not installed")
            continue
        if version not in (None, distribution.version):
            found.append(f"{name} is {distribution.version}, not {version}")
        # Byte code may go and come; pip lists what it compiled.
        files = [file for file in distribution.files or () if file.suffix != ".pyc"]
        if lost := [file for file in files if not Path(str(file.locate())).exists()]:
            found.append(f"{name} has lost {len(lost)} of {len(files)} files, {lost[0]} among them")
    return found


if __name__ == "__main__":
    sentences = faults(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print("\n".join(sentences))
    sys.exit(bool(sentences))
