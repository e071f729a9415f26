"""The HTTP gateway: OpenAI's API and Fairlane's own, for teams that do not speak Kafka."""
