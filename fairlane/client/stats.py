"""Counters of a client."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Counts since the client was made.

    Attributes:
        submitted: requests handed to the producer.
        published: requests the log acknowledged.
        publish_failed: requests that did not get into the log.
        retried: publications beyond the first of a request.
        answered: handles that got a reply.
        in_flight: requests submitted and not answered at this moment.
        ignored_replies: replies on the topic that nobody here waits for.
        undecodable_replies: records on the topic that are no reply.
    """

    submitted: int
    published: int
    publish_failed: int
    retried: int
    answered: int
    in_flight: int
    ignored_replies: int
    undecodable_replies: int
