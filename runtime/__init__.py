"""The kgen runtime: open a bundle, check it, load it, plan, bind, launch. Needs a CUDA driver and nothing else.

bundle = Bundle.open("moe.kgen")
kernels = bundle.load(device=0)
call = kernels["gemm"].plan(m=37).bind(a=a, b=b, out=out)
call(stream)
"""

from kgen.runtime.bundle import Bundle
from kgen.runtime.kernels import Kernels, LoadedOperator, Plan
from kgen.runtime.memory import DeviceBuffer
from kgen.runtime.tensors import Ptr

__all__ = ["Bundle", "DeviceBuffer", "Kernels", "LoadedOperator", "Plan", "Ptr"]
