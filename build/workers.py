"""Run jobs in pristine processes: a fork server imports tilelang once, and every job forks from it.

tilelang's output can depend on what its process lowered before; a fresh process a job makes the same input give the
same bytes, and a job that crashes takes nothing with it.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from kgen.runtime.errors import BuildError, KgenError

PRELOAD = ("kgen.compiler.lower", "kgen.build.toolchain")


def run(function: Callable[[Any], Any], requests: Sequence[Any], jobs: int) -> Iterator[tuple[int, Any]]:
    """Call `function` on every request, at most `jobs` at a time; yields (index, result) as they finish.

    A result is what `function` returned, or a `KgenError`: the one it raised, or a `BuildError` that holds the
    traceback or says how the process died. `function` and requests are pickled by reference and by value.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    waiting = list(enumerate(requests))[::-1]
    running: dict[Connection, tuple[int, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                index, request = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_job, args=(sender, function, request))
                process.start()
                sender.close()
                running[receiver] = (index, process)
            for receiver in wait(list(running)):
                index, process = running.pop(receiver)
                try:
                    result = receiver.recv()
                except EOFError:
                    process.join()
                    result = BuildError(f"a build process died with exit code {process.exitcode}")
                process.join()
                receiver.close()
                yield index, result
    finally:
        for _, process in running.values():
            process.terminate()


def _job(sender: Connection, function: Callable[[Any], Any], request: Any) -> None:
    # Compilers write to the process's own stdout; it is shown only when the job fails.
    with tempfile.TemporaryFile() as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            result = function(request)
        except KgenError as error:
            result = error
        except Exception:
            output.seek(0)
            result = BuildError(f"{traceback.format_exc()}{output.read().decode(errors='replace')}")
        sender.send(result)
