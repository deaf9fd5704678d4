"""Formats in which models write calls, a file each, and the table of all of them."""
