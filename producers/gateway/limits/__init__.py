"""How many calls one key and one user may make."""
