"""The OpenAI wire format: requests, responses and errors as data, for the gateway and for backfill files."""
