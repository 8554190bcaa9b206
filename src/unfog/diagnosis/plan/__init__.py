"""What a run will take, predicted."""
