"""What was found or answered before: in Redis, keyed by tenant first, and what is asked for most in this process.

Nothing here is needed: whatever is missing, late, damaged or somebody else's is a miss.
"""
