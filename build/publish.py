"""Writing a built bundle to disk: one ``.kgen`` file or a directory, whole or not at all."""

from __future__ import annotations

from pathlib import Path

from kgen.build.files import write_atomic, write_directory_atomic
from kgen.runtime.errors import BuildError
from kgen.runtime.format import container


def publish(files: dict[str, bytes], path: str | Path) -> None:
    """Write `files` to `path`: a single file where it ends in ``.kgen``, otherwise a directory.

    Raises:
        BuildError: a directory bundle would replace something that is not a bundle.
    """
    path = Path(path)
    if path.suffix == ".kgen":
        write_atomic(path, container.pack(files))
        return
    if path.exists() and not (path / container.MANIFEST).is_file():
        raise BuildError(f"{path} exists and is not a bundle: choose another name, or one that ends in .kgen")
    write_directory_atomic(path, files)
