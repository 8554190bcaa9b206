"""From files to batches. An image passes through these modules, in this order:

sources (find and open files) -> decode -> scan and prepare (make a dataset) -> stream (shuffle) -> prefetch -> augment.

Pixels are uint8 and labels whole numbers. This layer does not depend on noise, networks or terminals.
"""
