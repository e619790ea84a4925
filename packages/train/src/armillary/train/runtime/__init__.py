"""Runtime services of a training run: health of ranks, checkpoint storage, profiling, random state."""
