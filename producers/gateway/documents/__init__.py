"""A tenant's collections and documents over HTTP."""
