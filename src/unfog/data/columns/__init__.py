"""Columns that become conditions: read from a table or from arrays, and their kinds."""
