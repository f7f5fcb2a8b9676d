"""Durable, resumable, operable background jobs for Django."""

__version__ = "0.1.0"
