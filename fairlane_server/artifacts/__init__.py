"""Files of model versions: where they come from, their digests, and the folder that keeps them on this machine."""
