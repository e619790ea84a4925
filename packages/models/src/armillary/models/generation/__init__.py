"""Text generation with a cache of keys and values that is sharded as the prompt is."""
