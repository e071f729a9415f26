"""Response cache: cached answers, coalescing of equal requests, and the caches of passages and vectors."""
