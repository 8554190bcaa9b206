"""Networks of other programs, so that their weights are sampled, measured and trained on; a run may name them too."""
