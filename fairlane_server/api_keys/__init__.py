"""API keys: how they look, what they may do, and the tables they are kept in. The gateway is where they are shown."""
