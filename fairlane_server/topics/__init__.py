"""Topics: the families of topics.yaml, and the plan that brings a cluster to them."""
