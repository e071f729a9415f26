"""Authentication: API keys and JWTs in, an identity out. The tenant of a call comes from here and nowhere else."""
