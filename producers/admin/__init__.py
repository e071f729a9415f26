"""The admin API: tenants, keys, users, dead letters, loads and the audit of a deployment, over HTTP."""
