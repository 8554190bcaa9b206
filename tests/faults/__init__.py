"""Real processes of the real program, and real faults: kills, full disks, damaged files, signals, divergence."""
