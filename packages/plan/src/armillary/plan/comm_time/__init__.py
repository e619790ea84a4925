"""Communication volume of attention methods, and the time of their plans and of a whole step."""
