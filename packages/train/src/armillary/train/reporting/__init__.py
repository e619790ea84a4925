"""What a run shows and keeps: lines, the bar, metrics.jsonl, trackers, profiles, traces and pictures."""
