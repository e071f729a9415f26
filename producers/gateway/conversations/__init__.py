"""A tenant's conversations over HTTP, and its erasures."""
