"""Logging: log lines and the progress bar, metrics.jsonl, experiment trackers, and plots of the loss."""
