"""The demo site: shows durable_jobs in a project, and is not part of the package."""
