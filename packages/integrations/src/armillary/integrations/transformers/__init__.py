"""Models of Hugging Face transformers on a shard of the sequence."""
