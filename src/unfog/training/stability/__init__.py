"""Keep training alive: divergence and roll-back, the NaN debugger, and recovery from out-of-memory."""
