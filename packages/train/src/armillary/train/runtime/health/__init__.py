"""What ranks of a run owe each other: signs of life, agreement, ends together, and one run at a time in a folder."""
