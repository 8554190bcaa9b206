"""What can be known before, during and after training: examinations of data, settings and runs, and predictions."""
