"""What blocks keep for backward, what they compute again, and what waits in the host's memory meanwhile."""
