"""Documents of text, and what makes tokens of them."""
