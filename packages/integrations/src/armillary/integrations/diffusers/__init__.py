"""Models of Hugging Face diffusers whose tokens are sharded over ranks."""
