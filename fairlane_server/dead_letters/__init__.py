"""Tools for operators to read, select and replay dead letters."""
