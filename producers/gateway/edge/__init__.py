"""Between the socket and the routes: limits, access log, and error bodies."""
