"""API keys: format, permissions, and the tables that store them. Callers present them to the gateway."""
