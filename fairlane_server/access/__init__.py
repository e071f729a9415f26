"""Rights on Kafka: users, ACLs and client quotas, generated from the topic families, tenants and models."""
