"""A network divided among processes: what one process does, to rounding, and what may befall it."""

from test_distributed import TORCHRUN, _ended, alone, largest_difference, launched, output, rows, started  # noqa: F401
