"""Between the socket and the routes: limits, the log of calls, and what errors look like."""
