"""Cost tokens: the unit of work in all services."""

OUTPUT_WEIGHT = 2
"""An output token takes about twice the engine time of a prompt token."""


def cost_tokens(prompt_tokens: int, output_tokens: int) -> int:
    return prompt_tokens + OUTPUT_WEIGHT * output_tokens
