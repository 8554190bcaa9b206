"""OpenMP: idle threads sleep soon, so that the cores are free for other processes. Imported before torch."""

from __future__ import annotations

import os
import sys

# GNU's OpenMP (torch on Linux) spins 300,000 times by default, LLVM's and Intel's for 200 ms. The first value is from
# the benchmark ledger: a step alone takes 4% longer, and two processes no longer stall each other.
_SHORT_SPINNING = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


def _limit_spinning() -> bool:
    """Set how long idle threads spin, unless the user has; return False if torch is loaded, and has read it already."""
    if any(name in os.environ for name in ("OMP_WAIT_POLICY", *_SHORT_SPINNING)):
        return True
    os.environ.update(_SHORT_SPINNING)  # processes started from here inherit it
    return "torch" not in sys.modules


SPINNING_LIMITED = _limit_spinning()
