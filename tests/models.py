"""Rows that the tests' kinds work on."""
