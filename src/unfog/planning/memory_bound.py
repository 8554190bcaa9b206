"""Upper bound on the memory of training, by arithmetic on the settings alone."""

from __future__ import annotations

from unfog.config.schema import Config
from unfog.data.augmentation.nonleaking import CONDITIONS
from unfog.pipeline.build import input_shape
from unfog.planning.peak_memory import CUDNN_WORKSPACE, ONEDNN_HALF


def memory_upper_bound(config: Config) -> float:
    """Return bytes that training never exceeds, in host memory or on a device; infinite for an open network.

    The bound takes microseconds, where an estimate takes a second or more, and in most runs it is all that is needed.
    """
    if config.network is None:
        return float("inf")
    channels, side, _ = input_shape(config)
    weights, activations = config.network.size_bound(channels, side, len(config.classes) + 1 + CONDITIONS)
    batch = config.training.microbatch or config.training.batch
    # 17 = weights, gradients, two averages, two moments and what the optimiser allocates for a moment, with gaps
    # between them; a checkpoint's snapshot of all that; and the gradient buckets of several processes.
    # 2 = every layer of a block keeps its input in fp32, twice.
    return 4 * (17 * weights + 2 * batch * activations) + max(CUDNN_WORKSPACE, ONEDNN_HALF)
