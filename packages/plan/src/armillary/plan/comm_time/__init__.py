"""What methods send, and how long that, their computation and a whole step take."""
