"""What every contract's candidates fulfil."""

from kgen.build.coverage import check_coverage
from kgen.runtime.format.expr import evaluate


def check_offers(contract):
    """Candidates are distinct, include the untuned choice and cover all dims; their work is at least the contract's."""
    candidates = contract.candidates()
    configs = [config for _, config in candidates]
    assert all(config not in configs[:i] for i, config in enumerate(configs))
    assert all(config in configs for _, config in contract.dispatch())
    check_coverage(contract.name, contract.dims, [guard for guard, _ in candidates], holes_only=True)
    assert contract.math in (None, "bfloat16", "float16", "float8_e4m3fn", "int8")
    for dims in contract.edge_dims() or [{}]:
        traffic = contract.traffic(dims)
        for guard, config in candidates:
            if evaluate(guard, {**contract.full_dims(dims), "sm_count": 132}):
                work = contract.work(config, dims)
                assert work.blocks * work.flops >= contract.flops(dims)
                assert work.blocks * work.read >= traffic.read and work.blocks * work.written >= traffic.written
                assert 32 <= work.threads <= 1024 and 0 < work.registers <= 255 and work.smem <= 227 * 1024
