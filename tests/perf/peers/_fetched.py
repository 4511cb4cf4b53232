"""Where `tests/perf/fetch.py --unpack` put other libraries' files."""

from __future__ import annotations

import os
from pathlib import Path

from kgen.build.peers import Unavailable


def fetched(path: str) -> Path:
    """That file or folder of the folder that KGEN_PEERS names.

    Raises:
        Unavailable: there is none.
    """
    folder = os.environ.get("KGEN_PEERS")
    if not folder:
        raise Unavailable(f"needs {path}, and KGEN_PEERS names no folder: see tests/perf/README.md")
    found = Path(folder, path)
    if not found.exists():
        raise Unavailable(f"KGEN_PEERS ({folder}) holds no {path}: see tests/perf/README.md")
    return found
