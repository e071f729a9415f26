"""Dead letters as an operator reads, selects and replays them."""
