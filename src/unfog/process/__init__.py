"""The run folder and the outside world: heartbeat, signals, launch and device."""
