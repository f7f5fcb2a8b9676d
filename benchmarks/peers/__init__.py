"""Other queues, each set up as its documentation says, in the same run as the floor and durable_jobs.

They are installed into an environment of their own (`make bench-peers`), and their modules here are imported there
alone.
"""
