"""Names of Kafka record headers, each declared once."""

TRACE_PARENT = "traceparent"
COST_TOKENS = "fairlane-cost-tokens"
SOURCE_TOPIC = "fairlane-source-topic"
SOURCE_PARTITION = "fairlane-source-partition"
SOURCE_OFFSET = "fairlane-source-offset"

DLT_ORIGINAL_TOPIC = "kafka_dlt-original-topic"
DLT_ORIGINAL_PARTITION = "kafka_dlt-original-partition"
DLT_ORIGINAL_OFFSET = "kafka_dlt-original-offset"
DLT_ORIGINAL_TIMESTAMP = "kafka_dlt-original-timestamp"
DLT_EXCEPTION_CLASS = "kafka_dlt-exception-fqcn"
DLT_EXCEPTION_MESSAGE = "kafka_dlt-exception-message"
