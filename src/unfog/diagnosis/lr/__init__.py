"""Which learning rate a run should have."""
