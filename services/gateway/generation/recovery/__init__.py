"""Answers whose worker died: they move to another, or their request is convicted as poison."""
