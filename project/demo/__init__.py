"""A real import, with a row of its own that mirrors the job."""
