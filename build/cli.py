"""The command line: ``kgen COMMAND``. Each command is a module of `kgen.build.commands`, imported when it is called."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from typing import Any

import click

from kgen.runtime import errors

COMMANDS = (
    "build",
    "lint",
    "schema",
    "ops",
    "inspect",
    "explain",
    "check",
    "diff",
    "pack",
    "tune",
    "verify",
    "bench",
    "report",
)
EXIT_CODES = {
    errors.SpecError: 2,
    errors.UnsupportedShape: 2,
    errors.UnknownOperator: 2,
    errors.FormatError: 3,
    errors.IntegrityError: 3,
    errors.ArchMismatch: 4,
    errors.DriverTooOld: 4,
    errors.DriverNotFound: 4,
    errors.DeviceLimit: 4,
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        return importlib.import_module(f"kgen.build.commands.{name}").command

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except BrokenPipeError:
            raise  # click ends quietly, as the other end did
        except (errors.KgenError, OSError) as error:
            fail(error)
        except ModuleNotFoundError as error:
            if (error.name or "kgen").startswith("kgen"):
                raise
            extra = "ml_dtypes" if error.name == "ml_dtypes" else "'kgen[compiler]'"
            fail(errors.BuildError(f"this command needs {error.name}: pip install {extra}"))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kgen")
def main() -> None:
    """Ahead-of-time CUDA kernels from declarative operator specs.

    \b
    Exit codes: 0 done · 1 a build or a verification failed · 2 wrong spec, dims or usage
                3 damaged or malformed bundle · 4 it would not run on this device
    """


def fail(error: Exception) -> None:
    """Print an error as the command line does, as JSON where --json was given, and exit with its code."""
    if "--json" in sys.argv[1:]:
        problems = [asdict(problem) for problem in getattr(error, "problems", ())]
        show_json({"error": {"class": type(error).__name__, "message": str(error), "problems": problems}})
    else:
        click.echo(f"{type(error).__name__}: {error}", err=True)
    sys.exit(next((code for cls, code in EXIT_CODES.items() if isinstance(error, cls)), 1))


def show_json(value: Any) -> None:
    """Print a value for machines."""
    click.echo(json.dumps(value, indent=1, sort_keys=True))


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")


def parse_dims(words: tuple[str, ...]) -> dict[str, int]:
    """``("m=37",)`` to ``{"m": 37}``."""
    dims = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value.lstrip("-").isdigit():
            raise click.BadParameter(f"{word!r} is not of the form DIM=INTEGER, such as m=37")
        dims[name] = int(value)
    return dims


if __name__ == "__main__":
    main()
