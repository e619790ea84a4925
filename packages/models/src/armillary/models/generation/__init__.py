"""Text from a model: decoding with a cache of keys and values that is sharded as the prompt was."""
