"""Every tolerance of the suite, relative to the scale (largest magnitude) of the reference.

fp32 where nothing else is said. Loosening one needs a reason in the commit.
"""

import numpy as np

LAYER = 1e-5
MODEL = 1e-4
STATE = 1e-5
# A sum of squares in another order.
HEADS = 1e-6
# bf16 operands and a bf16 result: one rounding of each.
KERNEL_BF16 = 1e-2


def assert_close(actual: object, expected: object, tolerance: float, what: str = "value") -> None:
    """Largest difference within `tolerance` of the largest magnitude of `expected`."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"{what}: {actual.shape} against {expected.shape}"
    assert np.isfinite(actual).all(), f"{what} is not finite"
    scale = max(float(np.abs(expected).max(initial=0.0)), 1e-6)
    error = float(np.abs(actual - expected).max(initial=0.0)) / scale
    assert error <= tolerance, f"{what}: error {error:.2e} of scale, allowed {tolerance:.0e}"
