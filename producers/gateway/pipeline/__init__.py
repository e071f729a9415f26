"""The gateway's way into the log and back: publishing, replies, streamed text, and what is known of the load."""
