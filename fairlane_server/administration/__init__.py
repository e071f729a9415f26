"""Administration of a deployment, for the command line and the admin API: the audit, and the tenants."""
