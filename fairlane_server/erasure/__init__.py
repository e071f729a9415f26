"""A person's right to be forgotten: what is erased at once, what expires, and when it is gone."""
