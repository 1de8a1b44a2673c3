"""Reading by libraries that a damaged file can crash, and the process with them: in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ..errors import DataError, shortened

# The process must not import what lies in the working folder.
_FRAME = """
import sys
sys.path = [place for place in sys.path if place]
try:
    exec(sys.argv.pop(1))
except Exception as error:
    sys.exit(str(error) or type(error).__name__)
"""


def read_apart(path: Path, library: str, script: str, *arguments: str) -> bytes:
    """What a script prints whose `sys.argv[1:]` are the path and the arguments; DataError if it raises or crashes."""
    command = [sys.executable, "-c", _FRAME, script, str(path), *arguments]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        crash = f"{library} crashed with exit code {done.returncode}"
        raise DataError(f"cannot read {path}: {shortened(said[-1] if said and done.returncode > 0 else crash)}.")
    return done.stdout
