"""Who asks: API keys and JWTs in, an identity out. The tenant of a call comes from here and from nowhere else."""
