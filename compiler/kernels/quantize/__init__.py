"""quantize: the programs. Each form is a module; they are written thread by thread, with 16-byte loads and stores."""

from collections.abc import Callable

from kgen.compiler.kernels.common import BY_HAND
from kgen.compiler.kernels.quantize.block import block
from kgen.compiler.kernels.quantize.flat import flat
from kgen.compiler.kernels.quantize.fused import fused
from kgen.compiler.kernels.quantize.group import group
from kgen.compiler.kernels.quantize.row import row
from kgen.compiler.kernels.quantize.staged import staged
from kgen.compiler.kernels.quantize.tensor import MEET_BYTES, tensor
from kgen.compiler.ops.contract import Config
from kgen.compiler.ops.quantize import Quantize
from kgen.compiler.program import Launch, Program, Workspace

FORMS: dict[str, Callable] = {
    "row": row,
    "group": group,
    "staged": staged,
    "block": block,
    "tensor": tensor,
    "flat": flat,
    "fused": fused,
}


def program(op: Quantize, config: Config) -> Program:
    """The program of `op` with `config`."""
    config = dict(config)
    form = config.pop("form")
    name = "_".join(["quantize", op.x.dtype, op.q.dtype, form, *(f"{key}{config[key]}" for key in sorted(config))])
    rename = {"divisors": "smooth"} if op.smooth else {}
    cooperative = form == "tensor"
    launch = Launch(FORMS[form](op, **config), name, rename, pass_config=BY_HAND, cooperative=cooperative)
    return Program((launch,), (Workspace("meet", "locks", MEET_BYTES),) if cooperative else ())
