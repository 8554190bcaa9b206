"""Train on several processes: the process group, sharded networks, coordination and the watchdog."""
