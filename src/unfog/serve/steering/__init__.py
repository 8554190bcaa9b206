"""Steering from the page: forms made of the settings, the checked commands they become, and their child processes."""
