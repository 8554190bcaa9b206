"""What can be said of a run from its record, its weights and its pictures."""
