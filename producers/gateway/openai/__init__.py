"""OpenAI's API, for programs that have an OpenAI client already."""
