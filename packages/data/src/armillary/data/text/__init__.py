"""Documents of text, and tokenizers."""
