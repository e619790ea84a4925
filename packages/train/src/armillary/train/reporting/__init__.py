"""Logging: lines and the progress bar, metrics.jsonl, experiment trackers, traces and pictures."""
