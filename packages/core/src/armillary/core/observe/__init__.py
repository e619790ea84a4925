"""What a run shows: bytes by axis and kind, a picture of what is computed and sent, names of what is computed."""
