"""Tar shards in the WebDataset layout, local or remote: index, range reads, cache and retries."""
