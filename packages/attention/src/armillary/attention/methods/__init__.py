"""Context-parallel attention methods, one file each."""
