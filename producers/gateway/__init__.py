"""The HTTP gateway: OpenAI's API and Fairlane's own, for teams without a Kafka client."""
