"""Runtime services of a training run: health of ranks, background threads, profiling, random state."""
