"""Responses and conversations that are kept: stored, recalled, made in the background. Responses may enter."""
